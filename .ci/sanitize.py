"""Runs our Triton kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory.

    python .ci/sanitize.py                            # memcheck and racecheck, about a minute on one GPU

The kernels (forward, dk and dv, dq, merge, add, minus_delta) run on a few short attentions whose sizes divide nothing:
once to compile, and once under each tool. Their results are compared with float64 on the host. Exit status 0 if the
numbers are right and no tool has found an error.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time

import torch

from dfa_megatron import kernels
from dfa_megatron.doctor import kernel_trial as trial
from dfa_megatron.kernels import merge as merge
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band

TOOLS = {
    "memcheck": ["--padding", "512"],  # a little beyond a tensor is nobody's, not the next tensor's
    "racecheck": ["--racecheck-report", "all"],
}
FOUND = 86
"""Exit status that a tool is told to give when it finds an error."""

BLOCKS = [
    (131, 131, CAUSAL, 4, 2, 64),
    (77, 213, Band(90, 7), 2, 2, 40),
    (1, 67, FULL, 2, 1, 128),
    (150, 35, Band(-1, 60), 2, 2, 24),
]
"""(q_len, kv_len, band, heads, kv_heads, head_dim)."""


def main() -> int:
    """Run the kernels bare, then under every tool; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", nargs="+", default=list(TOOLS), choices=TOOLS)
    parser.add_argument("--bare", action="store_true", help="only run the kernels, under no tool")
    args = parser.parse_args()
    if args.bare:
        _attentions()
        _merges()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    # Without a caching allocator every tensor is an allocation of its own, whose end the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    script = [sys.executable, __file__, "--bare"]
    commands = {"bare": script}
    for tool in args.tool:
        commands[tool] = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *TOOLS[tool], *script]
    status = 0
    for name, command in commands.items():
        start = time.perf_counter()
        code = subprocess.run(command, env=environment, check=False).returncode  # noqa: S603 we wrote it ourselves
        said = {0: "clean", FOUND: "FOUND ERRORS"}.get(code, f"FAILED with status {code}")
        print(f"{name}: {said} ({time.perf_counter() - start:.0f} s)", flush=True)
        status = status or code
    return status


def _device() -> str:
    return "cpu" if interpreted() else "cuda"


def _attentions() -> None:
    """Compare forward and backward with float64 on the host."""
    kernel = kernels.get("triton")
    for q_len, kv_len, band, heads, kv_heads, head_dim in BLOCKS:
        for dtype in (torch.bfloat16, torch.float32):
            block = trial.Trial(
                q_len=q_len, kv_len=kv_len, band=band, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                head_dim_v=head_dim, dtype=dtype, device="cpu",
            )  # fmt: skip
            inputs = block.inputs(seed=q_len)
            want = trial.run(ReferenceKernel(), block, tuple(x.double() for x in inputs))
            got = trial.run(kernel, block, tuple(x.to(_device()) for x in inputs))
            for name, g, w, limit in zip(trial.RESULTS, got, want, (0.01, 1e-4, 0.03, 0.03, 0.03), strict=True):
                _compare(f"{name} of {block}", g, w, limit)


def _merges() -> None:
    """Compare merge, add and minus_delta on rows of longer buffers, in place and into memory of their own."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for count, length, heads, head_dim in ((2, 37, 3, 40), (3, 1, 5, 128), (4, 129, 2, 64)):
        outs, lses = draw(count, 2, length + 3, heads, head_dim), draw(count, 2, heads, length)
        lses[0, :, :, 0] = -math.inf
        parts = [(out[:, 1:-2], lse) for out, lse in zip(outs, lses, strict=True)]
        on_device = outs.to(_device(), copy=True)[:, :, 1:-2], lses.to(_device(), copy=True)
        there = list(zip(*on_device, strict=True))
        want = torch.empty_like(parts[0][0], dtype=torch.float64), torch.empty_like(parts[0][1], dtype=torch.float64)
        merge.merge([(out.double(), lse.double()) for out, lse in parts], want)
        sums = [out.contiguous().clone() for out, _ in there]
        into = torch.empty_like(sums[0]), torch.empty_like(there[0][1])
        merge.merge(there, into)
        merge.merge(there, there[0])
        for result in (into, there[0]):
            for name, g, w in zip(("out", "lse"), result, want, strict=True):
                _compare(f"merged {name}", g, w, 1e-5)
        merge.add(sums, sums[0])
        _compare("sum", sums[0], sum(out.double() for out, _ in parts), 1e-6)
        dots = merge.minus_delta(into[0], sums[1]), merge.minus_delta(want[0], parts[1][0].double())
        _compare("minus_delta", *dots, 1e-5)


def _compare(name: str, got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    got = got.cpu().double()
    seen = want.isfinite()
    if not torch.equal(got.isfinite(), seen):
        raise SystemExit(f"{name}: infinite where it should not be")
    error = float((got - want)[seen].norm() / want[seen].norm().clamp(min=1.0))
    if not error <= limit:
        raise SystemExit(f"{name}: error {error:.2e}, over {limit:.0e}")


if __name__ == "__main__":
    sys.exit(main())
