"""Batches whose rows have other documents, or other masks: one attention, exact row by row."""

from __future__ import annotations

import random
from typing import Any

import torch

import dfa_megatron
from dfa_megatron import masks
from dfa_megatron.plan.language.layout import Layout, cross
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.rows import join_rows
from dfa_megatron.runtime.cu_seqlens import Offsets
from dfa_megatron.sequence.roll import roll_sequence
from dfa_megatron.sharding import local_positions, shard_sequence, unshard_sequence
from tests.fuzz.random_case import of_two
from tests.support.arguments import told
from tests.support.attend import Case, compare, together
from tests.support.packs import drawn_layout, random_offsets
from tests.support.plan_cases import every_mask
from tests.support.workers import over_ranks


def drawn_rows(draw: random.Random, ranks: int) -> tuple[Case, Layout]:
    """Rows of documents, of masks, or of masks of two sequences, in a layout by name or by value."""
    count, tokens, keys = draw.randint(1, 3), draw.randint(1, 8 * ranks), draw.randint(1, 9 * ranks)
    options: dict[str, Any] = {"heads": 4, "kv_heads": draw.choice([1, 2, 4]), "head_dim": 8, "batch": 1}
    options |= {"with_sinks": draw.random() < 0.3, "seed": draw.randrange(10**6)}
    kind = draw.choice(["documents", "documents", "masks", "two"])
    names = ["contiguous", "zigzag", *(["load_balanced"] if kind != "two" else [])]
    layout: Any = draw.choice([*names, drawn_layout(draw, ranks, tokens)])
    if kind == "two" and isinstance(layout, Layout):
        layout = cross(layout, drawn_layout(draw, ranks, keys))
    if kind == "documents":
        apart: tuple[Mask | Offsets, ...] = tuple(random_offsets(tokens, draw) for _ in range(count))
        options |= {"causal": draw.random() < 0.6, "window_size": draw.choice([(-1, -1), (3, 0), (2, 3)])}
    elif kind == "masks":
        apart = tuple(draw.choice([case.mask for case in every_mask(tokens, draw)]) for _ in range(count))
    else:
        apart = tuple(of_two(tokens, keys, draw) for _ in range(count))
    joined, held = join_rows(apart, layout, ranks)
    more = {"offsets": joined} if kind == "documents" else {"mask": joined, "tokens": count * tokens}
    if kind == "two":
        more["keys"] = count * keys
    return Case(apart=apart, layout=layout, **more, **options), held


def test_rows_that_differ_are_exact() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        case, held = drawn_rows(draw, ranks := draw.randint(1, 7))
        together(case, ranks, layout=held)


@over_ranks(1, 3)
def test_public_functions_take_rows_that_differ(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(16):
        case, held = drawn_rows(draw, ranks)
        compare(case, rank, ranks, layout=held, ulysses_degree=draw.choice([1, 1, "auto"]))
        if case.offsets:
            whole = torch.arange(case.length).view(len(case.apart), -1)
            asked: dict[str, Any] = {"layout": case.layout, "cu_seqlens": case.apart}
            mine = shard_sequence(whole, **asked)
            assert torch.equal(mine.flatten(), case.rows(rank, ranks, held))
            assert torch.equal(unshard_sequence(mine, **asked), whole)
            rolled = torch.where(torch.isin(whole + 1, torch.tensor(case.offsets)), -1, whole + 1)
            assert torch.equal(roll_sequence(mine, -1, fill=-1, **asked), shard_sequence(rolled, **asked))
            starts = torch.tensor(case.offsets)
            starts = starts[torch.searchsorted(starts, mine, right=True) - 1]
            assert torch.equal(local_positions(whole.shape[1], **asked), mine - starts)


@over_ranks(2)
def test_rows_that_do_not_fit_are_one_clear_error_on_every_rank(rank: int, ranks: int) -> None:
    qkv = [torch.randn(2, 8, heads, 16) for heads in (4, 2, 2)]
    for rows, why in (
        ([(0, 16)], "documents or masks of 1 rows in a batch of 2"),
        ([(0, 16), (0, 9, 18)], "the rows of a batch are equally long"),
        ([(0, 16), (0, 9 - rank, 16)], "rank 1"),
    ):
        text = told(lambda rows=rows: dfa_megatron.dist_flash_attn_varlen_func(*qkv, rows, causal=True))  # type: ignore[misc]
        assert why in text, text
    text = told(lambda: dfa_megatron.dist_flash_attn_func(*qkv, mask=[masks.causal(16), 7]))
    assert "mask of type list" in text, text
