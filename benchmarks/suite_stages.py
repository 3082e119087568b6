"""The stages of suite.py: every GPU test, then every measurement of docs/benchmarks.md, with commands and times."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Stage:
    """One command. minutes: expected on H200, longer where kernels compile for the first time. limit: seconds."""

    name: str
    what: str
    command: list[str]
    minutes: int
    limit: float
    gpus: int = 1
    needs: tuple[str, ...] = ()
    """Modules."""
    files: tuple[Path, ...] = ()
    """Scripts, or programs on the PATH."""
    environment: dict[str, str] = field(default_factory=dict)
    beside: bool = False
    """It times nothing and is content with one GPU: it may run while others like it do, each on a GPU of its own."""


def stages(gpus: int, out: Path) -> list[Stage]:
    """All, in order: tests, then measurements. out: the folder for results, absolute."""
    return tests(out) + measurements(max(gpus, 1), out)


def tests(out: Path) -> list[Stage]:
    """Every test that needs a GPU; each leaves a file for docs/update_support.py."""

    def suite(name: str, what: str, *arguments: str, minutes: int, processes: int = 0, **more: object) -> Stage:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        command += ["--support-report", str(out / f"support-{name}.jsonl")]
        if processes and importlib.util.find_spec("xdist"):  # tests of one compiled kernel stay in one process
            command += ["-n", str(min(processes, os.cpu_count() or 1)), "--dist", "loadgroup"]
        needs = ("pytest", "pytest_timeout", *more.pop("needs", ()))  # type: ignore[misc]
        return Stage(name, what, command, minutes, 60.0 * (3 * minutes + 2), needs=needs, **more)  # type: ignore[arg-type]

    def kernels(name: str, which: str, minutes: int) -> Stage:
        return suite(
            f"kernels-{name}", "kernels against float64", "--timeout", "280", "tests/kernels", "-m", "on_gpu",
            "-k", which,
            "--ignore", "tests/kernels/test_kernel_bands.py",  # none of it on a GPU, and it needs hypothesis
            minutes=minutes, processes=12, beside=True,
        )  # fmt: skip

    return [
        kernels("flash4", "flash4", 2),
        kernels("triton", "triton", 2),
        kernels("others", "not flash4 and not triton", 1),
        suite(
            "stress", "200 random attentions a kernel", "--timeout", "600", "tests/kernels/test_kernel_stress.py",
            minutes=2, processes=12, environment={"DFA_STRESS": "200"}, beside=True,
        ),
        suite(
            "together", "one GPU plays all ranks", "--timeout", "280", "tests/runtime/test_together_gpu.py",
            minutes=2, processes=8, beside=True,
        ),
        suite("remat", "rematerialization and offload", "tests/remat", "-m", "on_gpu", minutes=1, beside=True),
        suite(
            "runtime", "NCCL, copy engines, packs, heads exchanged, benchmark", "--timeout", "420", "tests/runtime",
            "tests/packing", "tests/bench", "-m", "on_gpu", "--ignore", "tests/runtime/test_together_gpu.py",
            minutes=4, gpus=2, processes=6,
        ),
        suite(
            "megatron", "Megatron-Core trains like one rank", "--timeout", "280", "tests/megatron/test_gpu.py",
            "tests/megatron/test_transformer_engine.py", minutes=2, gpus=2, processes=6, needs=("megatron",),
        ),
    ]  # fmt: skip


def measurements(gpus: int, out: Path) -> list[Stage]:
    """Every measurement, the ones that say what works first."""
    python = sys.executable
    command = [python, "-m", "dfa_megatron.cli.main"]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    cli = [*torchrun, "-m", "dfa_megatron.cli.main"]
    ranks = ["--ranks", str(gpus)]

    def bench(name: str, what: str, preset: str, seconds: int, *more: str, needs: int = 2, **variables: str) -> Stage:
        arguments = [*command, "bench", *(["--ranks", "1"] if preset == "one_gpu" else ranks), "--preset", preset]
        arguments += [*more, "--budget", str(seconds), "--out", str(out / name)]
        return Stage(name, what, arguments, seconds // 60, seconds + 180.0, gpus=needs, environment=variables)

    def script(name: str, what: str, *arguments: str, minutes: int, ranks: bool = True, **more: object) -> Stage:
        file = HERE / f"{arguments[0]}.py"
        start = torchrun if ranks else [python]
        return Stage(
            name, what, [*start, str(file), *arguments[1:]], minutes, 60.0 * (3 * minutes + 2), files=(file,), **more
        )  # type: ignore[arg-type]

    megatron = ("megatron",)
    both = ("deepspeed", "transformers")
    return [
        Stage("doctor", "every kernel right, and its speed", [*command, "doctor"], 2, 600.0),
        Stage("profile", "rates for the planner", [*cli, "doctor", "--profile", str(out / "profile.json")], 3, 600.0,
              gpus=2),
        Stage("trace", "a real run over its simulation", [*command, "trace", *ranks, "--out", str(out / "trace.json")],
              1, 300.0, gpus=2),
        bench("bench-quick", "attention beside peers", "quick", 300, "--peers", needs=1),
        bench("bench-grid", "lengths, heads, peers", "grid", 540, "--cuda-graph", "--peers"),
        bench("bench-schedules", "every schedule", "schedules", 240),
        bench("bench-ablations", "what overlap is worth", "ablations", 240),
        bench("bench-transports", "NCCL and copy engines", "transports", 240),
        bench("bench-ulysses", "heads exchanged", "quick", 240, "--ulysses-degree", "1", "2"),
        bench("bench-no-link", "without the direct link", "quick", 240, "--peers", NCCL_P2P_DISABLE="1"),
        bench("bench-one-gpu", "ours over the bare kernel", "one_gpu", 180, needs=1),
        script("packed", "packed documents beside ring-flash-attn", "packed", "--out", str(out / "packed.json"),
               minutes=3, gpus=2),
        script("megatron-layers", "layers and training steps", "megatron_layers", "--out",
               str(out / "megatron_layers.json"), minutes=8, needs=megatron),
        script("megatron-loss", "losses beside one rank's and another seed's", "megatron_loss",
               "--out", str(out / "megatron_loss.json"), minutes=10, needs=megatron),
        script("deepspeed-stress", "ZeRO-3 in every order", "deepspeed_stress", "--out",
               str(out / "deepspeed_stress.json"), minutes=4, gpus=2, needs=both),
        script("deepspeed-training", "ZeRO-3 beside Ulysses", "deepspeed_training", "--out",
               str(out / "deepspeed_training.json"), "--budget", "420", minutes=8, gpus=2, needs=both),
        script("deepspeed-qwen3", "a whole Qwen3-4B, 64K tokens, optimizer on the CPU", "deepspeed_training",
               "--shapes", "qwen3-4b", "--layers", "36", "--vocabulary", "151936", "--lengths", "65536",
               "--offload-optimizer", "--tiled", "--methods", "dfa-remat", "ulysses-full", "--budget", "300",
               "--out", str(out / "deepspeed_qwen3.json"), minutes=5, gpus=2, needs=both,
               environment={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // gpus))}),  # the CPU's optimizer
        script("deepspeed-longest", "the longest sequence of a step, beside ALST", "deepspeed_longest",
               "--out", str(out / "deepspeed_longest.json"), minutes=9, gpus=2, ranks=False, needs=both),
        script("payload", "delta or out in a backward", "payload", "--out", str(out / "payload.json"),
               minutes=2, gpus=2, needs=("flash_attn",)),
        script("kernel-speed", "every block kernel", "kernel_speed", "--out", str(out / "kernels.json"), minutes=4,
               ranks=False),
        script("kernel-sweep", "block sizes of triton", "kernel_speed", "--sweep", "--length", "16384", "--kv-heads",
               "32", "--mask", "causal", "--out", str(out / "sweep.json"), minutes=6, ranks=False, needs=("triton",)),
        Stage("sanitize", "memcheck and racecheck of triton", [python, str(HERE / "sanitize.py")], 3, 600.0,
              needs=("triton",), files=(Path("compute-sanitizer"),)),
    ]  # fmt: skip
