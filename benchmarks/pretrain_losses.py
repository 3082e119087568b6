"""Runs Megatron-LM's pretrain_gpt.py with its own attention and with ours: losses side by side, and a step's time.

    git -C ~/Megatron-LM archive core_v0.19.0 | tar x -C /tmp/megatron-lm             # any clone, unchanged
    python -m benchmarks.pretrain_losses --scripts /tmp/megatron-lm --out losses.json

Every run is a torchrun of the same script on invented tokens. All but own-tp start from the same weights:

    own-1       Megatron's attention on one GPU, with which the others are compared
    own-tp      the same, weights and heads over all GPUs; each draws its own, so losses are not compared
    own-cp      Transformer Engine's context parallelism over all GPUs
    own-cp-full the same, layers recomputed in full
    flags       ours by --cp-comm-type and --spec, on Megatron's own batches; layers recomputed without attention
    before      as flags, by the tree of this package in --before
    launcher    ours by dfa_megatron.launch, with the loss by tiles; recomputed likewise
    flags-none  as flags, nothing recomputed
    prove-cp    as launcher, after the job has proved itself over all GPUs
    prove-tp    the same with weights and heads over all GPUs, so that losses are not compared

Megatron compiles a helper at its first start: that needs make and g++. Each run's output is in OUT.RUN.log, and the
file has every run that has ended, with the median time of the later half of its steps. The exit status is 1 if one
failed or its losses are further away than --tolerance.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACE = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)", re.IGNORECASE)
LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([-+.\dEe]+|nan|inf)", re.IGNORECASE)
MODEL = """
--num-layers 4 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 16 --group-query-attention
--num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
--position-embedding-type rope --rotary-base 500000 --attention-dropout 0.0 --hidden-dropout 0.0
--no-create-attention-mask-in-dataloader --micro-batch-size 1 --global-batch-size 1 --lr 1e-4 --min-lr 1e-4
--lr-decay-style constant --bf16 --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0
--eval-interval 1000
--log-interval 1 --seed 1234 --no-gradient-accumulation-fusion --no-rope-fusion
--no-masked-softmax-fusion --no-bias-swiglu-fusion --distributed-timeout-minutes 5
"""
LOCAL = "--transformer-impl local --no-persist-layer-norm"
OURS = "--cp-comm-type dfa --spec dfa_megatron.megatron get_spec"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TILED = "--dfa-loss-tile 1024"
PROOF = re.compile(r"prove: .*?(compute what one rank computes|first difference:)[^\n]*", re.DOTALL)
RUNS = ("own-1", "own-tp", "own-cp", "own-cp-full", "before", "flags", "launcher", "flags-none", "prove-cp", "prove-tp")
OWN = RUNS[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, compare, print and write; return the exit status."""
    args = flags(argv)
    lend_helpers(args.scripts)
    report: dict[str, Any] = {"arguments": {name: str(value) for name, value in vars(args).items()}, "runs": []}
    for name in args.runs:
        cannot = "no Transformer Engine" if name.startswith("own-cp") and not transformer_engine() else ""
        cannot = "no --before" if name == "before" and args.before is None else cannot
        row = {"run": name, **({"losses": [], "cannot": cannot} if cannot else trained(args, name))}
        own = next((row["losses"] for row in report["runs"] if row["run"] == OWN), None)
        if own and row["losses"] and not name.endswith("-tp"):
            row["largest_difference"] = max(abs(a - b) for a, b in zip(row["losses"], own, strict=False))
        report["runs"].append(row)
        print(json.dumps(row), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(side_by_side(report["runs"]), flush=True)
    good = all(not row.get("failed") and row.get("largest_difference", 0) <= args.tolerance for row in report["runs"])
    return int(not good)


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", type=Path, required=True, help="the folder of pretrain_gpt.py, a Megatron-LM tree")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--before", type=Path, help="another tree of this package")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--gpus", type=int, default=2, help="of the runs on several")
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--train-iters", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest difference of a step's loss")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which a run is ended")
    args = parser.parse_args(argv)
    if not (args.scripts / "pretrain_gpt.py").is_file():
        parser.error(f"there is no pretrain_gpt.py in {args.scripts}")
    args.scripts, args.out = args.scripts.resolve(), args.out.resolve()
    args.before = args.before and args.before.resolve()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


def transformer_engine() -> bool:
    """Return whether Transformer Engine is installed."""
    return importlib.util.find_spec("transformer_engine") is not None


def command(args: argparse.Namespace, name: str) -> list[str]:
    """Return the command of a run."""
    ranks = 1 if name == OWN else args.gpus
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launched = name.startswith(("launcher", "prove"))
    words += ["-m", "dfa_megatron.launch"] if launched else []
    words += [str(args.scripts / "pretrain_gpt.py"), *MODEL.split()]
    words += [] if transformer_engine() else LOCAL.split()
    words += ["--seq-length", str(args.seq_length), "--max-position-embeddings", str(args.seq_length)]
    words += ["--train-iters", str(args.train_iters)]
    words += ["--tensor-model-parallel-size" if name.endswith("-tp") else "--context-parallel-size", str(ranks)]
    words += [] if name.startswith("own") else OURS.split()
    words += RECOMPUTED.split() if launched or name in ("own-cp-full", "flags", "before") else []
    words += TILED.split() if launched else []
    return words + (["--dfa-prove"] if name.startswith("prove") else [])


def trained(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the losses of a run, and why it failed if it did."""
    log = args.out.with_suffix(f".{name}.log")
    paths, tree = [sysconfig.get_path("include"), *_includes()], args.before if name == "before" else ROOT
    environment = {
        **os.environ,
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
    }
    begin, failed = time.perf_counter(), ""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603 -- the command is ours
            command(args, name), cwd=args.out.parent, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            failed = f"ended after {args.seconds:.0f} s"
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(60)
    text = log.read_text(encoding="utf-8", errors="replace")
    losses, paces = numbers_of(text, LOSS), numbers_of(text, PACE)
    if not failed and process.returncode:
        failed = f"exit status {process.returncode}, see {log.name}"
    if not failed and len(losses) != args.train_iters:
        failed = f"{len(losses)} losses of {args.train_iters}, see {log.name}"
    seconds = round(time.perf_counter() - begin, 1)
    row: dict[str, Any] = {"losses": losses, "seconds": seconds}
    if proof := PROOF.search(text):
        row["proof"] = proof.group(0).splitlines()
    if paces:
        row["ms_per_step"] = statistics.median(paces[len(paces) // 2 :])  # the first ones compile and plan
    return {**row, **({"failed": failed} if failed else {})}


def numbers_of(text: str, kind: re.Pattern[str]) -> list[float]:
    """Return the loss or the milliseconds of each step that a log has."""
    found = {int(step): float(number) for step, number in kind.findall(text)}
    return [found[step] for step in sorted(found)]


def lend_helpers(scripts: Path) -> None:
    """Give a tree the compiled helper of the installed Megatron-Core, if it has none of its own."""
    theirs = scripts / "megatron" / "core" / "datasets"
    installed = importlib.util.find_spec("megatron")
    for folder in (installed.submodule_search_locations or []) if installed else []:
        for file in (Path(folder) / "core" / "datasets").glob("helpers_cpp*.so"):
            if theirs.is_dir() and not (theirs / file.name).exists():
                shutil.copy(file, theirs / file.name)


def _includes() -> list[str]:
    """Return where PyTorch has pybind11's headers."""
    spec = importlib.util.find_spec("torch")
    return [str(Path(str(spec.origin)).parent / "include")] if spec else []


def side_by_side(runs: list[dict[str, Any]]) -> str:
    """Return a table with a step in each line and a run in each column."""
    lines = ["step  " + "  ".join(f"{row['run']:>10}" for row in runs)]
    for step in range(max((len(row["losses"]) for row in runs), default=0)):
        cells = (f"{row['losses'][step]:10.5f}" if step < len(row["losses"]) else " " * 10 for row in runs)
        lines.append(f"{step + 1:4}  " + "  ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
