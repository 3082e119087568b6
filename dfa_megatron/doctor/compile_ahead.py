"""Compile in processes side by side what the doctor runs next: one after another its kernels compile for two minutes.

What they compile stays in the caches of Triton and FlashAttention-4 on disk, where the checks and the ranks find it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dfa_megatron.doctor import distributed_call
from dfa_megatron.doctor.kernel_trial import Trial, errors, of_form
from dfa_megatron.kernels import KERNELS, get
from dfa_megatron.plan.language.geometry import Form

COMPILED = ("flash4", "triton")
"""Kernels that compile when they are first called."""
PATIENCE = 120.0
"""Seconds for a process; what it has not compiled by then is compiled where it is needed."""


def compile_ahead(shape: Trial, names: Iterable[str], ranks: int, forms: Sequence[Form], cases: Sequence[str]) -> None:
    """Compile for these kernels (or all), forms of a mask and distributed calls; say what, on standard error."""
    commands = [*_of_kernels(shape, list(names) or list(KERNELS), forms)]
    if shape.device == "cpu" or not commands:
        return
    if ranks > 1:
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        sizes = json.dumps(distributed_call.sizes_of(shape, ranks))
        calls = [*launch, distributed_call.__name__, sizes, os.devnull]
        commands += [(f"calls over {ranks} ranks, {case}", [*calls, case]) for case in cases]
    print(f"compiling, once for this machine: {'; '.join(what for what, _ in commands)}", file=sys.stderr, flush=True)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([sys.executable, "-m", *command], **quiet) for _, command in commands]  # noqa: S603
    for process in running:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its ranks then


def _of_kernels(shape: Trial, names: Sequence[str], forms: Sequence[Form]) -> Iterator[tuple[str, list[str]]]:
    for name in (name for name in names if name in COMPILED and get(name).refusal(shape.need()) is None):
        for form in forms:
            sizes = [shape.heads, shape.kv_heads, shape.head_dim, str(shape.dtype).removeprefix("torch.")]
            yield f"{name}, {form}", [__name__, json.dumps([name, form, shape.device, *sizes])]


def main() -> None:
    """Compile one form of one kernel."""
    name, form, device, heads, kv_heads, head_dim, dtype = json.loads(sys.argv[1])
    shape = Trial.square(256, heads, kv_heads, head_dim, getattr(torch, dtype), device)
    errors(get(name), of_form(shape, form))


if __name__ == "__main__":
    main()
