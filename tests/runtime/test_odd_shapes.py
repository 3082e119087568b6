"""Tensors that nearly fit: one of a call's has another shape or dtype, and the call runs or is refused in words."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dfa_megatron as dfa
from dfa_megatron import indexed, loss, masks, recurrence
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.sequence.decode import decode_attn_func
from dfa_megatron.sequence.max_logits import max_logits

DTYPES = (torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
OFFSETS: tuple[Any, ...] = ((0, 8), (0, 3, 8), [(0, 8), (0, 2, 8)], [(0, 8)], (0, 9), (), (8,), (0, 8, 4), [()])


class Draws(random.Random):
    """Draws the tensors of a call, of which one has an odd shape and perhaps another an odd dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.odd = random.Random(seed)
        self.shape_in, self.dtype_in = self.odd.randrange(7), self.odd.randrange(12)

    def x(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes, self.shape_in, self.dtype_in = [*shape], self.shape_in - 1, self.dtype_in - 1
        if self.shape_in == 0:
            at = self.odd.randrange(len(sizes))
            sizes = self.odd.choice([
                [*sizes[:at], self.odd.choice([0, 1, sizes[at] + 1, sizes[at] - 1, 2 * sizes[at]]), *sizes[at + 1 :]],
                [*sizes[:at], *sizes[at + 1 :]], [*sizes[:at], self.odd.randrange(3), *sizes[at:]], [],
            ])  # fmt: skip
        return torch.randn(sizes).mul(3).to(self.odd.choice(DTYPES) if self.dtype_in == 0 else dtype)

    def qkv(self) -> tuple[torch.Tensor, ...]:
        return self.x(2, 8, 4, 16), self.x(2, 8, 2, 16), self.x(2, 8, 2, 16)

    def index(self) -> tuple[torch.Tensor, ...]:
        return self.x(2, 8, 3, 8), self.x(2, 8, 8), self.x(2, 8, 3)

    def words(self) -> tuple[Any, ...]:
        hidden, head = self.x(2, 8, 16), loss.Head(weight=self.x(32, 16), bias=self.choice([None, self.x(32)]))
        return hidden, head, self.x(2, 8, dtype=torch.int64)

    def offsets(self, *usual: Any) -> Any:
        return self.choice([*usual * 20, *OFFSETS])


CALLS: dict[str, Callable[[Draws], object]] = {
    "attention": lambda d: dfa.dist_flash_attn_func(*d.qkv(), causal=True, sinks=d.choice([None, d.x(4)])),
    "mask": lambda d: dfa.dist_flash_attn_func(*d.qkv(), mask=d.choice([masks.causal(8), [masks.causal(8)] * 2])),
    "pack": lambda d: dfa.dist_flash_attn_varlen_func(*d.qkv(), d.offsets([(0, 8), (0, 3, 8)]), causal=True),
    "tokens": lambda d: dfa.dist_flash_attn_varlen_func(
        *(d.x(8, n, 16) for n in (4, 2, 2)), d.offsets((0, 8)), causal=True
    ),
    "shard": lambda d: dfa.shard_sequence(d.x(2, 8, 3), dim=d.choice([1, 0, -1, 5]), cu_seqlens=d.offsets(None)),
    "unshard": lambda d: dfa.unshard_sequence(d.x(2, 8, 3), dim=d.choice([1, 0, -1, 5]), cu_seqlens=d.offsets(None)),
    "roll": lambda d: dfa.roll_sequence(d.x(2, 8, 3), -1, dim=d.choice([1, 0, -1, 5]), cu_seqlens=d.offsets(None)),
    "decode": lambda d: decode_attn_func(d.x(2, 1, 4, 16), *d.qkv()[1:], starts=d.choice([None, [0, 3], [1, 9], [0]])),
    "max logits": lambda d: max_logits(*d.qkv()[:2], causal=True),
    "topk": lambda d: indexed.index_topk(*d.index(), d.choice([3, 20, 0]), cu_seqlens=d.offsets(None)),
    "chosen": lambda d: indexed.sparse_attn(*d.qkv(), d.x(2, 8, 3, dtype=torch.int64).clamp(-1, 7)),
    "latent": lambda d: indexed.sparse_attn(
        d.x(2, 8, 4, 24), d.x(2, 8, 1, 24), None, torch.zeros(2, 8, 1).long(), head_dim_v=d.choice([16, 25, None])
    ),
    "indexer": lambda d: indexed.index_loss(*d.index(), *d.qkv()[:2], d.x(2, 4, 8)),
    "scores": lambda d: loss.token_scores(*d.words(), tile=d.choice([4, 100])),
    "cross-entropy": lambda d: loss.cross_entropy(*d.words()),
    "convolution": lambda d: recurrence.dist_conv(
        lambda x, _: x * 1, d.x(2, 8, 6), d.choice([4, 0, 2.5]), dim=d.choice([1, 0, -1, 5]), cu_seqlens=d.offsets(None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_tensors_nearly_fit_runs_or_is_refused_in_words(name: str) -> None:
    torch.manual_seed(0)
    ran = 0
    for seed in range(150):
        try:
            CALLS[name](Draws(seed))
            ran += 1
        except UnsupportedError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert 0 < ran < 150
