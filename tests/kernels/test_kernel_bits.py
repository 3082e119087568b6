"""Kernels of numerics="invariant": a leaf has the same bits alone, in company, in any order, with some heads, twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dfa_megatron.kernels import BlockCall, BlockKernel, Saved
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Segment
from tests.support.kernel_cases import Case, every_target, usable

Leaf = tuple[torch.Tensor, ...]
"""q, k, v and dout, (batch, rows, heads, head_dim)."""

Results = tuple[torch.Tensor, ...]
"""out, lse, dq, dk and dv."""

INTERPRETED = {"lengths": ((20, 20), (5, 17)), "square": ((20, 20), (7, 7))}
"""Each leaf takes seconds there."""

LENGTHS = {"cpu": ((64, 64), (5, 33), (64, 1), (33, 64)), "cuda": ((2048, 2048), (130, 777), (1024, 1), (513, 2048))}
SQUARE = {"cpu": ((64, 64), (33, 33), (1, 1)), "cuda": ((2048, 2048), (777, 777), (1, 1))}
DTYPES = {"cpu": (torch.float64, torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def from_number(x: torch.Tensor, first: int) -> torch.Tensor:
    """The same values in memory that begins so many numbers behind where PyTorch aligns it."""
    return x.new_empty(x.numel() + first)[first:].view(x.shape).copy_(x)


def together(kernel: BlockKernel, leaves: Sequence[Leaf], band: Band, first: int = 0) -> list[Results]:
    """Run leaves in one call, and return the results of each."""
    parts, q_at, kv_at = list[Segment](), 0, 0
    for q, k, *_ in leaves:
        parts.append(Segment(q_at, q_at + q.shape[1], kv_at, kv_at + k.shape[1], band))
        q_at, kv_at = parts[-1].q_hi, parts[-1].kv_hi
    *qkv, dout = (from_number(torch.cat(tensors, 1), first) for tensors in zip(*leaves, strict=True))
    call = BlockCall(*qkv, Segments(tuple(parts), q_at, kv_at), 0.3, deterministic=True)
    out, lse = kernel.forward(call)
    saved = Saved(lse, out=out) if kernel.backward_needs == "out" else Saved(lse, minus_delta(dout, out))
    dq, dk, dv = kernel.backward(call, dout, saved)
    rows, keys = [slice(s.q_lo, s.q_hi) for s in parts], [slice(s.kv_lo, s.kv_hi) for s in parts]
    return [
        (out[:, row], lse[:, :, row], dq[:, row], dk[:, key], dv[:, key]) for row, key in zip(rows, keys, strict=True)
    ]


def assert_same(found: Sequence[Results], alone: Sequence[Results], what: str) -> None:
    for one, other in zip(found, alone, strict=True):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), one, other, strict=True):
            assert torch.equal(a, b), f"{name} differs {what}"


def check_bits(name: str, device: str, dtype: torch.dtype, sizes: tuple[int, int, int], band: Band) -> None:
    lengths = (LENGTHS if band.is_full else SQUARE)[device]
    if interpreted():
        lengths, sizes = INTERPRETED["lengths" if band.is_full else "square"], (4, 2, 16)
    heads, kv_heads, head_dim = sizes
    cases = [Case(q, kv, band, heads, kv_heads, head_dim) for q, kv in lengths]
    kernel = usable(name, device, dtype, *cases, deterministic=True, packed=True, invariant=True)
    random = torch.Generator(device).manual_seed(heads)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(2, rows, heads, head_dim, generator=random, device=device).to(dtype)

    both = [(draw(q, heads), draw(kv, kv_heads), draw(kv, kv_heads), draw(q, heads)) for q, kv in lengths]
    leaves = [tuple(x[:1] for x in leaf) for leaf in both]
    alone = [together(kernel, [leaf], band)[0] for leaf in leaves]
    assert_same([together(kernel, [leaf], band)[0] for leaf in leaves], alone, "the second time")
    for first in (1, 4):
        moved = [together(kernel, [leaf], band, first)[0] for leaf in leaves]
        assert_same(moved, alone, f"in memory that begins {first} numbers further on")
    assert_same(together(kernel, leaves, band), alone, "in company")
    assert_same(together(kernel, leaves[::-1], band), alone[::-1], "in another order")
    for leaf, want in zip(both, alone, strict=True):
        beside = together(kernel, [leaf], band)[0]
        assert_same([tuple(x[:1] for x in beside)], [want], "beside another sequence")
    group, half = heads // kv_heads, kv_heads // 2
    some = [tuple(x[:, :, : (half * group if x.shape[2] == heads else half)] for x in leaf) for leaf in leaves]
    counts = (half * group,) * 3 + (half, half)
    of_some = [
        tuple(x[:, :n] if x.dim() == 3 else x[:, :, :n] for x, n in zip(of, counts, strict=True)) for of in alone
    ]
    assert_same(together(kernel, some, band), of_some, "with half the heads")
    dense = [tuple(x.contiguous() for x in leaf) for leaf in some]
    assert_same(together(kernel, dense, band), of_some, "with half the heads, dense")


@every_target
@pytest.mark.parametrize("sizes", [(4, 4, 64), (8, 2, 64), (8, 2, 128), (4, 2, 9)], ids="{0[0]}-{0[1]}-{0[2]}".format)
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(40, 0)], ids=["full", "causal", "window"])
def test_a_leaf_has_the_same_bits_in_any_company(
    name: str, device: str, sizes: tuple[int, int, int], band: Band
) -> None:
    dtypes = DTYPES[device] if not interpreted() else (torch.float32,)
    for dtype in dtypes:
        check_bits(name, device, dtype, sizes, band)
