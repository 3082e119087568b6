"""Ranks that hold numbers of tokens that differ, also none, and queries over the keys of another sequence."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import masks
from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.plan.language.layout import Layout, by_name, contiguous, cross, of_lengths, zigzag_documents
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.rows import join_rows
from dfa_megatron.runtime.cu_seqlens import Offsets
from dfa_megatron.sequence.roll import roll_sequence
from dfa_megatron.sharding import local_positions, shard_sequence, unshard_sequence
from tests.fuzz import random_case
from tests.fuzz.attempt import attempt
from tests.fuzz.random_case import of_two
from tests.support.arguments import told
from tests.support.attend import Case, compare, results_together, together
from tests.support.packs import drawn_layout, random_offsets
from tests.support.plan_cases import every_mask
from tests.support.workers import by_turns, over_ranks


def drawn(ranks: int, over: str, count: int) -> Iterator[random_case.Case]:
    """Draws of tests.fuzz whose ranks hold any numbers of tokens: one sequence or two, under any mask."""
    cases = (random_case.draw(4, number, over, ranks=(ranks,)) for number in itertools.count())
    return itertools.islice((case for case in cases if not isinstance(case.options["layout"], str)), count)


@pytest.mark.support("runtime", "any length: ranks that hold numbers of tokens that differ, also none")
@pytest.mark.support("runtime", "two sequences: queries over the keys of another")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 9])
def test_random_lengths_layouts_and_masks_are_exact(ranks: int) -> None:
    kinds = Counter[tuple[str, bool]]()
    cases = [*drawn(ranks, "together", 20 if ranks > 1 else 12)]  # one rank calls the public functions five times
    for case in by_turns(cases):
        found = attempt(case)
        assert found.kind in ("right", "refused"), f"{case.line}: {found.reason}"
        kinds[found.kind, case.whole.keys > 0] += 1
    assert min(kinds["right", False], kinds["right", True]) > 0, kinds


def test_a_causal_row_before_all_keys_sees_none() -> None:
    case = Case(tokens=9, keys=4)
    got = results_together(case, 2, layout=cross(contiguous(9, 2), contiguous(4, 2)))
    assert not got.out[:, :5].any()
    assert torch.isneginf(got.lse[..., :5]).all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_documents_of_any_tokens_and_none_are_exact_also_cut_zigzag_one_by_one(ranks: int) -> None:
    for offsets in ((0, 16, 19, 40), (0, 0, 5, 5, 19, 40, 40, 40)):
        together(Case(offsets=offsets), ranks, layout=zigzag_documents(offsets, ranks))
        for causal, layout in ((True, contiguous(40, ranks)), (False, of_lengths([0] * (ranks - 1) + [40]))):
            together(Case(offsets=offsets, causal=causal, window_size=(9, 4)), ranks, layout=layout)


def test_padding_between_documents_sees_nothing_and_is_not_seen() -> None:
    mask = masks.documents([5, 0, 9, 8], room=[8, 4, 12, 8])
    got = results_together(Case(tokens=32, mask=mask), 3, layout=contiguous(32, 3))
    padding = [5, 6, 7, 8, 9, 10, 11, 21, 22, 23]
    assert not got.out[:, padding].any()
    assert not got.dk[:, padding].any()
    together(Case(tokens=32, mask=mask), 3, layout=zigzag_documents((0, 8, 12, 24, 32), 3))
    with pytest.raises(ValueError, match="do not fit"):
        masks.documents([5, 9], room=[8, 8])


@pytest.mark.support("runtime", "load_balanced layout of any mask")
def test_any_mask_can_balance_its_tokens() -> None:
    for ranks in (2, 3):
        together(Case(tokens=37, mask=masks.prefix_lm(37, 11)), ranks, layout="load_balanced")


@over_ranks(2, 3)
def test_any_length_over_gloo(rank: int, ranks: int) -> None:
    for case in drawn(ranks, "gloo", 8):
        found = attempt(case, rank, ranks)
        assert found.kind in ("right", "refused"), f"{case.line}: {found.reason}"
    for length in (10, 13, 2):
        for layout in (contiguous(length, ranks), by_name("zigzag", length, ranks)):
            for degree in {1, ranks}:
                compare(Case(tokens=length, heads=12, kv_heads=4), rank, ranks, layout=layout, ulysses_degree=degree)
    # What a mask or documents say need no layout.
    compare(Case(tokens=11, mask=masks.prefix_lm(11, 4)), rank, ranks)
    compare(Case(offsets=(0, 5, 11)), rank, ranks, layout="load_balanced")
    # Keys of another number in equal parts.
    compare(Case(tokens=2 * ranks, keys=5 * ranks), rank, ranks)
    x = torch.arange(11.0, dtype=torch.float64).expand(3, 11).clone().requires_grad_()
    for layout in ("contiguous", "zigzag", of_lengths([11] + [0] * (ranks - 1))):
        part = shard_sequence(x, layout=layout)
        whole = unshard_sequence(part, layout=layout)
        assert torch.equal(whole, x)
        (grad,) = torch.autograd.grad((whole * x.detach()).sum(), x)
        mine = shard_sequence(torch.arange(11), layout=layout, dim=0)
        want = torch.zeros_like(x)
        want[:, mine] = ranks * x.detach()[:, mine]
        assert torch.equal(grad, want)


@over_ranks(4)
def test_neighbours_that_exchange_heads_may_all_hold_no_token(rank: int, ranks: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        case = Case(tokens=2, heads=4, kv_heads=2, dtype=dtype)
        compare(case, rank, ranks, layout=contiguous(2, ranks), ulysses_degree=2)


@over_ranks(3)
def test_lengths_that_nobody_named_are_refused_with_the_layout_that_works(rank: int, ranks: int) -> None:
    q = torch.randn(1, 5 if rank == 0 else 4, 2, 8)
    with pytest.raises(DistAttentionError, match=r"layouts\.of_lengths"):
        dfa_megatron.dist_flash_attn_func(q, q, q, causal=True)


def test_what_does_not_fit_is_refused() -> None:
    q = torch.randn(1, 6, 2, 8)
    with pytest.raises(UnsupportedError, match="its layout has 5 there"):
        dfa_megatron.dist_flash_attn_func(q, q, q, causal=True, layout=contiguous(5, 1))
    with pytest.raises(UnsupportedError, match="a layout of 2 ranks"):
        dfa_megatron.dist_flash_attn_func(q, q, q, causal=True, layout=contiguous(12, 2))
    both = cross(contiguous(6, 1), contiguous(4, 1))
    with pytest.raises(UnsupportedError, match="of one sequence"):
        dfa_megatron.dist_flash_attn_func(q, q[:, :4], q[:, :4], mask=masks.causal(6), layout=both)
    with pytest.raises(UnsupportedError, match="cu_seqlens with other keys"):
        dfa_megatron.dist_flash_attn_varlen_func(q[0], q[0, :4], q[0, :4], (0, 6), causal=True, layout=both)


# Batches whose rows have other documents, or other masks: one attention, exact row by row.


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
