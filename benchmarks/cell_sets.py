"""The named sets of cells that `python -m benchmarks.cells` runs: each in order of worth, on so many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

K = 1024
NO_LINK = {"NCCL_P2P_DISABLE": "1"}
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
CPU_OF_DEEPSPEED = {"DS_ACCELERATOR": "cpu"}
END_TO_END = ("tp-te-full", "te-full", "full", "remat")


@dataclass(frozen=True, slots=True)
class Cell:
    """One command and what it needs.

    Attributes:
        name: of the cell, and of its files.
        command: program and arguments, for no shell. `python` first is this interpreter; `{out}` is the cell's own path
            in the folder of results.
        seconds: after which it is ended.
        gpus: that it uses.
        packages: modules that it imports.
        programs: that it starts.
        environment: variables beside those of the caller.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int = 0
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def ranks(count: int, *words: str) -> tuple[str, ...]:
    """Return a command on so many ranks of this machine."""
    return ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), *words)


def attention(name: str, gpus: int, seconds: float, *flags: str, environment: Mapping[str, str] | None = None) -> Cell:
    """Return a cell of the attention benchmark, which leaves out what it has no time for."""
    command = ("python", "-m", "benchmarks.attention", "--ranks", str(gpus), *flags)
    command += ("--budget", f"{seconds - 30:.0f}", "--out", "{out}")
    return Cell(name, command, seconds, gpus, environment=environment or {})


def ring_self_attention(gpus: int) -> Cell:
    """Return a cell of Ring Self-Attention beside ours, with lengths around the longest that fits 80 GB."""
    lengths = [str(n * K) for n in (8, 16, 24, 28, 32, 36, 40, 64, 128, 256, 512)]
    flags = ("--seq-length", *lengths, "--baselines", "ring_self_attention", "--repetitions", "3", "--seconds", "0.2")
    return attention("paper-rsa", gpus, 150, *flags, "--heads", "32", "--passes", "both")


def packages(gpus: int) -> Cell:
    """Return a cell of every package that is installed."""
    return attention(f"packages-{gpus}", gpus, 180, "--preset", "quick", "--baselines", "installed")


def between_hosts(name: str, gpus: int, per_host: int, seconds: float, *flags: str) -> Cell:
    """Return a cell of the attention benchmark whose ranks are on "hosts" with sockets between them."""
    alone = {"NCCL_NET": "Socket"} if per_host > 1 else SOCKETS
    words = ("-m", "benchmarks.own_host", "benchmarks.attention", *flags, "--budget", f"{seconds - 30:.0f}")
    environment = {**alone, "RANKS_PER_HOST": str(per_host)}
    return Cell(name, ranks(gpus, *words, "--out", "{out}"), seconds, gpus, environment=environment)


def layers(name: str, gpus: int, seconds: float, shapes: str, lengths: tuple[int, ...], *flags: str) -> Cell:
    """Return a cell of one Megatron layer end to end: shapes of the paper at thousands of tokens."""
    cases = [f"{length * K}:{shape}" for length in lengths for shape in shapes.split()]
    words = ("--layers", *cases, "--modes", *END_TO_END, "--train", "--depth", "1", "--warmup", "1", *flags)
    command = ranks(gpus, "-m", "benchmarks.megatron_layers", *words, "--out", "{out}.json")
    return Cell(name, command, seconds, gpus, ("megatron.core", "transformer_engine"))


def megatron(name: str, gpus: int, seconds: float, *flags: str) -> Cell:
    """Return a cell of Megatron's layers or training steps."""
    command = ranks(gpus, "-m", "benchmarks.megatron_layers", *flags, "--out", "{out}.json")
    return Cell(name, command, seconds, gpus, ("megatron.core",))


def hybrid(name: str, gpus: int, seconds: float, length: int) -> Cell:
    """Return a cell of a Qwen3-Next-shaped group of layers beside Megatron's all-to-all, at thousands of tokens."""
    words = ("--layers", f"{length * K}:qwen3-next", "--modes", "te", "te-full", "remat-te", "remat", "none")
    command = ("-m", "benchmarks.megatron_layers", *words, "--warmup", "1", "--repeats", "3", "--train")
    packages = ("megatron.core", "transformer_engine", "fla")
    return Cell(name, ranks(gpus, *command, "--out", "{out}.json"), seconds, gpus, packages)


def ulysses(name: str, gpus: int, seconds: float, *flags: str) -> Cell:
    """Return a cell of training beside DeepSpeed's Ulysses."""
    words = ("-m", "benchmarks.deepspeed_training", *flags, "--budget", f"{seconds - 60:.0f}", "--out", "{out}.json")
    return Cell(name, ranks(gpus, *words), seconds, gpus, ("deepspeed", "transformers"))


def longest(name: str, gpus: int, seconds: float, *flags: str) -> Cell:
    """Return a cell that finds the longest sequence, beside ALST."""
    words = ("-m", "benchmarks.deepspeed_longest", "--gpus", str(gpus), *flags, "--budget", f"{seconds - 20:.0f}")
    return Cell(name, ("python", *words, "--out", "{out}.json"), seconds, gpus, ("deepspeed", "transformers"))


def longest_on_one() -> Cell:
    """Return a cell that finds the longest sequence of four layers of Qwen3-4B on a GPU of 40 GiB to 16K tokens."""
    flags = ("--shape", "qwen3-4b", "--layers", "4", "--offload-optimizer", "--memory-gib", "40")
    search = ("--shortest", str(128 * K), "--resolution", str(16 * K))
    methods = ("--methods", "dfa-tiles-host-stages", "ulysses-full-host", "dfa-tiles-host")
    return longest("longest-qwen3-4b", 1, 590, *flags, *search, *methods)


def packs(name: str, gpus: int, seconds: float, tokens: int) -> Cell:
    """Return a cell of packed documents beside ring-flash-attn, thousands of tokens a rank."""
    words = ("-m", "benchmarks.packed", "--tokens-per-rank", str(tokens * K), "--out", "{out}.json")
    return Cell(name, ranks(gpus, *words), seconds, gpus)


def padded_packs(tokens: int) -> Cell:
    """Return a cell of packs cut document by document beside Transformer Engine, thousands of tokens a rank."""
    words = ("-m", "benchmarks.packed_zigzag", "--tokens-per-rank", str(tokens * K), "--out", "{out}.json")
    return Cell(f"packed-zigzag-{tokens}k", ranks(2, *words), 120, 2)


def tiled_loss(gpus: int) -> Cell:
    """Return a cell of a Megatron model's loss, whole and by tiles."""
    command = ranks(gpus, "-m", "benchmarks.tiled_loss", "--out", "{out}.json")
    return Cell(f"tiled-loss-{gpus}", command, 180, gpus, ("megatron.core",))


def gpu_tests(gpus: int) -> Cell:
    """Return every test that computes on GPUs; those that need more skip."""
    words = ("-m", "pytest", "-q", "-m", "gpu", "-n", "12", "--dist", "loadgroup", "--support-report", "{out}.jsonl")
    return Cell(f"gpu-tests-{gpus}", ("python", *words), 420, gpus, ("pytest", "xdist"))


def host_time(gpus: int) -> Cell:
    """Return the host's milliseconds of a call."""
    words = ("-m", "benchmarks.host_time", "--kernel", "flash4", "--out", "{out}.json")
    command = ("python", *words) if gpus == 1 else ranks(gpus, *words)
    return Cell(f"host-time-{gpus}", command, 120, gpus, ("flash_attn.cute",))


def pack_programs(tokens: int) -> Cell:
    """Return programs of several ranks over a pack, beside the kernel alone on one GPU."""
    words = ("-m", "benchmarks.pack_programs", "--tokens-per-rank", str(tokens * K), "--out", "{out}.json")
    return Cell(f"pack-programs-{tokens}k", ("python", *words), 150, 1)


def recurrence(name: str, *flags: str) -> Cell:
    """Return a Qwen3-Next-shaped group of layers on one GPU."""
    words = ("-m", "benchmarks.recurrence", "--link-gbs", "370", *flags, "--out", "{out}.json")
    return Cell(name, ("python", *words), 150, 1, ("fla",))


def paper(gpus: int) -> tuple[Cell, ...]:
    """Return the cells of docs/paper.md on so many GPUs."""
    return (
        layers("paper-7b", gpus, 160, "7b", (32, 128, 256), "--repeats", "3"),
        layers("paper-33h", gpus, 200, "33h-as-34 33h-as-40 33h", (32, 128, 256), "--repeats", "3"),
        attention("paper-schedules", gpus, 130, "--preset", "schedules"),
        attention("paper-ablations", gpus, 140, "--preset", "ablations", "--transport", "p2p", "copy_engine"),
        layers("paper-gqa", gpus, 160, "gqa", (32, 128, 256), "--repeats", "3"),
        layers("paper-512k", gpus, 230, "7b 33h gqa", (512,), "--repeats", "1"),
        layers("paper-few-heads", gpus, 200, "16h 8h 4h 2h", (128, 512), "--repeats", "1"),
        ulysses("paper-ulysses", gpus, 200, "--shapes", "llama-3-8b", "33-heads", "--lengths", "32768", "131072"),
        longest("paper-longest", gpus, 230, "--layers", "1", "--shortest", str(K * K),
                "--methods", "dfa-tiles", "ulysses-full"),
        ring_self_attention(gpus),
    )  # fmt: skip


def paper_toy() -> tuple[Cell, ...]:
    """Return the same kinds of cells on two ranks of a CPU, to see that they run."""
    toy_layers = ("-m", "benchmarks.megatron_layers", "--toy", "--layers", "64:33h", "--train", "--depth", "1")
    modes = ("--modes", "tp-te-full", "tp-full", "full", "remat")
    toy = ("--device", "cpu", "--seq-length", "64", "--heads", "2", "--head-dim", "16", "--passes", "forward")
    little = ("--repetitions", "2", "--seconds", "0", "--kernel", "cpu", "--schedule", "ring", "balanced")
    little += ("--baselines", "ulysses")
    words = ("-m", "benchmarks.attention", "--ranks", "2", *toy, *little, "--ablation", "none", "no_overlap")
    dry = ("-m", "benchmarks.deepspeed_training", "--dry-run", "--shapes", "llama-3-8b", "--lengths", "64")
    return (
        Cell("toy-layers", ranks(2, *toy_layers, *modes, "--out", "{out}.json"), 90, packages=("megatron.core",)),
        Cell("toy-ablations", ("python", *words, "--out", "{out}"), 90),
        Cell(
            "toy-ulysses",
            ranks(2, *dry, "--out", "{out}.json"),
            90,
            packages=("deepspeed",),
            environment=CPU_OF_DEEPSPEED,
        ),
    )


ONE_GPU = (
    gpu_tests(1),
    host_time(1),
    tiled_loss(1),
    pack_programs(8),
    Cell("sanitize", ("python", "-m", "benchmarks.sanitize"), 240, 1, programs=("compute-sanitizer",)),
    attention("one-gpu", 1, 120, "--preset", "one_gpu"),
    longest_on_one(),
    recurrence("recurrence"),
    recurrence("recurrence-forward", "--no-backward"),
    pack_programs(32),
    pack_programs(128),
    Cell("fuzz", ("python", "-m", "tests.fuzz", "--device", "cuda", "--seconds", "200", "--out", "{out}.json"), 300, 1),
)

TWO_GPUS = (
    gpu_tests(2),
    packages(2),
    attention("automatic-nvlink", 2, 180, "--preset", "automatic"),
    attention("automatic-no-link", 2, 180, "--preset", "automatic", environment=NO_LINK),
    between_hosts("automatic-sockets", 2, 1, 240, "--preset", "automatic"),
    hybrid("hybrid", 2, 180, 64),
    host_time(2),
    tiled_loss(2),
    padded_packs(8),
    padded_packs(32),
    packs("packed-8k", 2, 120, 8),
    megatron("megatron-layers", 2, 240, "--layers", "65536:8:14336", "131072:8:14336", "--warmup", "1", "--repeats",
             "3", "--train"),
    megatron("megatron-training", 2, 300, "--layers", "--vocab-size", "32768", "--train",
             *(f"131072:4:3:{mode}" for mode in ("remat", "full", "te-full")), "524288:1:2:remat"),
    packs("packed-32k", 2, 150, 32),
    Cell("verify-cost", ranks(2, "-m", "benchmarks.verify_cost", "--out", "{out}.json"), 90, 2),
    Cell("deepspeed-stress", ranks(2, "-m", "benchmarks.deepspeed_stress", "--out", "{out}.json"), 300, 2,
         ("deepspeed", "transformers")),
)  # fmt: skip

FOUR_GPUS = (
    attention("four-automatic", 4, 300, "--preset", "automatic", "--seq-length",
              *(str(length * K) for length in (8, 32, 64, 128, 512))),
    packs("four-packed-8k", 4, 120, 8),
    packs("four-packed-16k", 4, 120, 16),
    megatron("four-layers", 4, 180, "--layers", "131072:8:14336", "--warmup", "1", "--repeats", "3", "--train"),
    megatron("four-training", 4, 240, "--layers", "--vocab-size", "32768", "--train",
             *(f"131072:4:3:{mode}" for mode in ("remat", "full", "te-full"))),
    megatron("four-tp2-cp2", 4, 150, "--layers", "131072:8:14336", "--tensor-model-parallel-size", "2", "--modes",
             "remat-te", "te-full", "--warmup", "1", "--repeats", "3", "--train"),
    hybrid("four-hybrid", 4, 180, 128),
    gpu_tests(4),
    host_time(4),
    packages(4),
    *paper(4),
)  # fmt: skip

EIGHT_GPUS = (
    attention("eight-packages", 8, 300, "--preset", "quick", "--baselines", "ulysses", "pytorch",
              "transformer_engine"),
    packs("eight-packed-8k", 8, 120, 8),
    packs("eight-packed-16k", 8, 120, 16),
    longest("eight-whole-llama", 8, 570, "--layers", "32", "--shortest", str(K * K), "--methods", "dfa-tiles-host",
            "ulysses-full-host"),
    between_hosts("eight-two-hosts", 8, 4, 240, "--preset", "automatic", "--transport", "p2p"),
    host_time(8),
    *paper(8),
)  # fmt: skip

SETS: dict[str, tuple[Cell, ...]] = {
    "paper": paper(2),
    "paper-toy": paper_toy(),
    "one-gpu": ONE_GPU,
    "two-gpus": TWO_GPUS,
    "four-gpus": FOUR_GPUS,
    "eight-gpus": EIGHT_GPUS,
}
"""Cells by the name of their set."""
