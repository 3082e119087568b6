"""Learned-sparse attention over gloo: choices, attention and losses are the oracle's, and planted faults show."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from dfa_megatron import masks, remat
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.indexed import index_loss, index_topk, sparse_attn
from dfa_megatron.indexed import topk as topk_module
from dfa_megatron.indexed.chosen import steps
from dfa_megatron.indexed.whole import Whole, scored_by
from dfa_megatron.layouts import contiguous, of_lengths, zigzag
from dfa_megatron.masks import Span
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.sharding import positions_of
from tests.indexed.drawn import TOLERANCE, compare_many
from tests.support.close import assert_close
from tests.support.live_bytes import LiveBytes
from tests.support.packs import drawn_layout
from tests.support.workers import over_ranks, run_ranks


@over_ranks(1, 2, 3, 5)
def test_choices_attention_and_losses_are_the_oracles(rank: int, ranks: int) -> None:
    with patch.object(topk_module, "KEYS", 16), patch.object(topk_module, "ROWS", 4):
        compare_many(rank, ranks, 10_000 * ranks, 8)


Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _own_keys_alone(rank: int, ranks: int) -> Any:
    """A rank looks at a share of the keys, and there is no union."""
    real: Choose = topk_module.choose

    def choose(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, topk: int, seen: Mask, spans: Any) -> Any:
        each = -(-seen.length // ranks)
        own = Span(rank * each, (rank + 1) * each)
        tiles = [tile for tile in seen.restrict(Span(0, seen.length), own) if tile]
        return real(q, k, w, topk, Mask("own", seen.length, tuple(tiles)), spans)

    return patch.object(topk_module, "choose", choose)


def _sorting(equals: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Stable sorts take equals in the order that a function gives the columns."""
    real = torch.Tensor.sort

    def sort(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not options.get("stable"):
            return real(x, *args, **options)
        columns = equals(torch.arange(x.shape[1]))
        values, order = real(x[:, columns], **options)
        return values, columns[order]

    return patch.object(torch.Tensor, "sort", sort)


def _the_last_of_equals(rank: int, ranks: int) -> Any:
    """Among equal scores the key that arrived last."""
    return _sorting(lambda columns: columns.flip(0))


def _own_rank_first_of_equals(rank: int, ranks: int) -> Any:
    """Among equal scores the keys of the rank that scores."""
    return _sorting(lambda columns: columns.roll(-(rank * len(columns) // ranks)))


def _other_documents(rank: int, ranks: int) -> Any:
    """The documents are forgotten."""
    real = Whole.of

    def of(x: torch.Tensor, over: Any, layout: Any, cu_seqlens: Any = None, mask: Any = None) -> Whole:
        return real(x, over, layout, None, mask)

    return patch.object(Whole, "of", of)


def _averaged_per_rank(rank: int, ranks: int) -> Any:
    """Each rank divides by the queries of its own."""
    return patch.object(Channel, "gather", lambda self, x, kind=None: [x])


FAULTS = [_own_keys_alone, _the_last_of_equals, _own_rank_first_of_equals, _other_documents, _averaged_per_rank]


def _with_fault(rank: int, ranks: int, fault: Callable[[int, int], Any]) -> None:
    with fault(rank, ranks):
        compare_many(rank, ranks, 0, 12)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: Callable[[int, int], Any]) -> None:
    with pytest.raises(AssertionError, match="case"):
        run_ranks(2, _with_fault, fault, grace=0.2)


def _restless(rank: int, ranks: int, chooses_anew: bool) -> tuple[torch.Tensor, ...]:
    """Return gradients of a checkpointed region whose indexer has other weights in the recompute."""
    torch.manual_seed(1)
    length, layout = 12 * ranks, contiguous(12 * ranks, ranks)
    rows = positions_of(layout, rank)
    index = [torch.randn(1, length, *shape).double()[:, rows] for shape in ((2, 4), (4,), (2,))]
    q, k, v = (torch.randn(1, length, 2, 4).double()[:, rows].requires_grad_() for _ in range(3))
    passes, chosen = list[int](), list[torch.Tensor]()

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        passes.append(1)
        found = index_topk(index[0], index[1], index[2] * (-1) ** len(passes), 3)
        chosen.append(found)
        return sparse_attn(q, k, v, found)

    before = COUNTERS.reused
    with ExitStack() as stack:
        if chooses_anew:
            stack.enter_context(patch.object(topk_module, "active_frame", lambda: None))
        out: torch.Tensor = checkpoint(region, q, k, v, use_reentrant=False, context_fn=remat.context_fn)
        given = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert len(passes) == 2
    assert torch.equal(*chosen)
    assert COUNTERS.reused == before + 2
    want = torch.autograd.grad(sparse_attn(q, k, v, chosen[0]).square().sum(), (q, k, v))
    for got, wanted in zip(given, want, strict=True):
        assert torch.equal(got, wanted)
    return given


def test_a_recompute_takes_the_first_choice_and_one_that_chooses_anew_is_caught() -> None:
    run_ranks(2, _restless, False)
    with pytest.raises(AssertionError):
        run_ranks(2, _restless, True, grace=0.2)


@over_ranks(3)
def test_choices_are_those_of_one_process_in_every_dtype(rank: int, ranks: int) -> None:
    alone = dist.new_group([rank], use_local_synchronization=True)
    draw = random.Random(0)
    with patch.object(topk_module, "KEYS", 32), patch.object(topk_module, "ROWS", 8):
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16) * 2):
            torch.manual_seed(seed)
            length = draw.randint(60, 150)
            layout, offsets = drawn_layout(draw, ranks, length), (0, draw.randint(1, 40), length)
            index = [torch.randn(1, length, *shape).to(dtype) for shape in ((3, 24), (24,), (3,))]
            index[1][:, ::3] = index[1][:, :1]  # equal keys
            rows = positions_of(layout, rank)
            want, total = index_topk(*index, 9, group=alone, cu_seqlens=offsets, return_lse=True)
            mine = [x[:, rows] for x in index]
            got, mine_total = index_topk(*mine, 9, cu_seqlens=offsets, layout=layout, return_lse=True)
            assert torch.equal(got, want[:, rows])
            assert torch.equal(mine_total, total[:, rows])


@over_ranks(4)
def test_heads_cut_over_ranks_give_the_teacher_of_all_heads(rank: int, ranks: int) -> None:
    group = [dist.new_group(sharing) for sharing in ([0, 1], [2, 3])][rank // 2]
    tensors = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    torch.manual_seed(0)
    length, layout = 20, of_lengths([13, 7])
    index = [torch.randn(1, length, *shape).double() for shape in ((2, 3), (3,), (2,))]
    q, k = torch.randn(1, length, 4, 3).double(), torch.randn(1, length, 2, 3).double()
    rows, heads, kv_heads = positions_of(layout, rank % 2), slice(rank // 2 * 2, rank // 2 * 2 + 2), [rank // 2]
    positions = index_topk(*(x[:, rows] for x in index), 5, group=group, layout=layout)
    mine = [x[:, rows].clone().requires_grad_() for x in index]
    part = q[:, rows, heads], k[:, rows][:, :, kv_heads]
    _, lse = sparse_attn(*part, part[1], positions, return_lse=True, group=group, layout=layout)
    where: Any = {"group": group, "layout": layout}
    loss = index_loss(*mine, *part, lse, positions, tp_group=tensors, **where)
    whole = [x.clone().requires_grad_() for x in index]
    everything = dist.new_group([rank], use_local_synchronization=True)
    all_of = index_topk(*index, 5, group=everything)
    _, dense = sparse_attn(q, k, k, all_of, return_lse=True, group=everything)
    want = index_loss(*whole, q, k, dense, all_of, group=everything)
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    assert_close(total, want, tolerance=TOLERANCE)
    for got, wanted in zip(torch.autograd.grad(loss, mine), torch.autograd.grad(want, whole), strict=True):
        assert_close(got, wanted[:, rows], tolerance=TOLERANCE)


@over_ranks(3)
def test_ranks_that_differ_are_told(rank: int, ranks: int) -> None:
    index = [torch.ones(1, 4, *shape) for shape in ((2, 3), (3,), (2,))]
    q = torch.ones(1, 4, 2, 3)
    with pytest.raises(DisagreementError, match="topk"):
        index_topk(*index, 2 + (rank == 1))
    with pytest.raises(DisagreementError, match=r"tokens of a rank: .*\n.*of_lengths"):
        index_topk(*(x[:, : 3 + (rank == 1)] for x in index), 2)
    positions = index_topk(*index, 2)
    with pytest.raises(DisagreementError, match="scale"):
        sparse_attn(q, q, q, positions, softmax_scale=1.0 + rank)
    with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match=r"twice|rank 1"):
        sparse_attn(q, q, q, positions if rank != 1 else torch.zeros_like(positions))
    alone, world = dist.new_group([rank], use_local_synchronization=True), dist.group.WORLD
    tokens = [*index, q, q, torch.zeros(1, 2, 4), torch.zeros_like(positions[..., :1])]
    odd: Any
    for name, odd in {
        "scale": {"softmax_scale": 2.0},
        "valid": {"valid": torch.tensor([[True] * 3 + [False]])},
    }.items():
        with pytest.raises(DisagreementError, match=rf"{name}: .* on rank 1"):  # of ranks that share heads
            index_loss(*tokens, group=alone, tp_group=world, **(odd if rank == 1 else {}))
    with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match="each query counts or not"):
        index_loss(*tokens, group=alone, tp_group=world, valid=torch.ones(1, 4 - (rank == 1), dtype=torch.bool))
    for name, changed in {  # all that travels
        "dtypes": {2: index[2].double()},
        "dtypes: .*64": {3: q.double(), 4: q.double()},
        "q": {3: q[..., :2]},
        "dtypes: .*16": {5: tokens[5].half()},
    }.items():
        given = dict(enumerate(tokens[:6])) | (changed if rank == 1 else {})
        with pytest.raises(DisagreementError, match=rf"{name}.* on rank 1"):
            index_loss(*given.values(), softmax_scale=1.0)
    with pytest.raises(DisagreementError, match="heads of a key"):  # which decide how many rows are summed at a time
        index_loss(*tokens[:4], q[:, :, : 1 + (rank == 1)], tokens[5], group=alone, tp_group=world)
    with pytest.raises(DisagreementError, match="topk"):
        index_loss(*tokens[:6], positions[..., : 1 + (rank == 1)] % 4, group=alone, tp_group=world)
    with pytest.raises(DisagreementError):  # compared at each call, and the group is lost
        index_topk(*index, 2, cu_seqlens=(0, 5 + rank, 12))


@pytest.mark.parametrize("small", [1.0, 2.0**-18])
def test_a_scaled_loss_of_float16_has_the_gradients_of_float32(small: float) -> None:
    torch.manual_seed(0)
    index = [(torch.randn(1, 40, *shape) * factor).half() for shape, factor in (((4, 8), 1), ((8,), 1), ((4,), small))]
    q, lse = torch.randn(1, 40, 4, 8), torch.randn(1, 4, 40)
    found = list[torch.Tensor]()
    for dtype in (torch.float16, torch.float32):
        mine = [x.to(dtype).requires_grad_() for x in index]
        for positions in (index_topk(*mine, 5), None):
            loss = index_loss(*mine, q, q, lse, positions)
            found += torch.autograd.grad(loss * 2.0**16, mine)
    for got, want in zip(found[:6], found[6:], strict=True):
        assert_close(got, want, tolerance=1e-2)


def _tensors(length: int = 6) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    index = [torch.ones(1, length, *shape) for shape in ((2, 3), (3,), (2,))]
    return index, torch.ones(1, length, 4, 3), torch.ones(1, length, 2, 3)


REFUSED: dict[str, Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "index_k": lambda index, q, k, chosen: index_topk(index[0], index[0], index[2], 3),
    "one floating dtype": lambda index, q, k, chosen: index_topk(index[0], index[1].double(), index[2], 3),
    "topk=0": lambda index, q, k, chosen: index_topk(*index, 0),
    "cu_seqlens and mask": lambda index, q, k, chosen: index_topk(*index, 3, cu_seqlens=(0, 6), mask=masks.causal(6)),
    "its layout has 5": lambda index, q, k, chosen: index_topk(*index, 3, layout=of_lengths([5])),
    "do not fit together": lambda index, q, k, chosen: sparse_attn(q, k, q, chosen),
    "head_dim_v": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen, head_dim_v=2),
    "sinks": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen, sinks=torch.ones(3)),
    "positions from": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen + 5),
    "comes twice": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen * 0),
    "does not see that key": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen, cu_seqlens=(0, 2, 6)),
    "each query has its own": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen[:, 1:]),
    "int32 or int64": lambda index, q, k, chosen: sparse_attn(q, k, k, chosen.float()),
    "lse": lambda index, q, k, chosen: index_loss(*index, q, k, q[..., 0], chosen),
    "valid": lambda index, q, k, chosen: index_loss(
        *index, q, k, q[..., 0].transpose(1, 2), chosen, valid=torch.ones(1, 6)
    ),
    "second derivative": lambda index, q, k, chosen: (
        torch.autograd.grad(sparse_attn(q.requires_grad_(), k, k, chosen).square().sum(), q, create_graph=True)[0]
        .sum()
        .backward()  # type: ignore[no-untyped-call]
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_supported_is_refused(why: str) -> None:
    index, q, k = _tensors()
    chosen = index_topk(*index, 2)
    with pytest.raises((UnsupportedError, RuntimeError), match=why):
        REFUSED[why](index, q, k, chosen)


def pairs_of(seen: Mask, spans: Iterable[Span]) -> int:
    """Return the pairs that rows see, which is the work of who scores them."""
    return sum(tile.area for span in spans for tile in seen.restrict(span, Span(0, seen.length)))


@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
@pytest.mark.parametrize("length", [1000, 8192])
def test_the_work_of_an_indexer_is_even(ranks: int, length: int) -> None:
    packs = masks.documents([length // 2, length // 8, length - length // 2 - length // 8])
    for seen, place in [(masks.causal(length), contiguous), (masks.causal(length), zigzag), (packs, contiguous)]:
        rows = scored_by(seen, place(length, ranks))
        work = [pairs_of(seen, spans) for spans in rows]
        assert max(work) <= 1.05 * min(work)
        assert sum(work) == seen.area
        assert sorted(x for spans in rows for span in spans for x in range(span.lo, span.hi)) == [*range(length)]
    own = [pairs_of(masks.causal(length), contiguous(length, 8).spans(rank)) for rank in range(8)]
    assert max(own) > 14 * min(own)


def test_no_tensor_is_as_large_as_queries_times_keys() -> None:
    length, most = 1200, 1 << 17
    index = [torch.randn(1, length, *shape, requires_grad=True) for shape in ((2, 4), (4,), (2,))]
    q, k = torch.randn(1, length, 4, 8, requires_grad=True), torch.randn(1, length, 1, 8, requires_grad=True)
    with ExitStack() as stack:
        for name in ("topk", "chosen", "index_loss"):
            stack.enter_context(patch(f"dfa_megatron.indexed.{name}.MEMORY", most))
        live = stack.enter_context(LiveBytes())
        positions = index_topk(*index, 20)
        out, lse = sparse_attn(q, k, None, positions, head_dim_v=6, return_lse=True)
        out.sum().backward()  # type: ignore[no-untyped-call]
        for chosen in (positions, None):
            index_loss(*index, q, k, lse, chosen).backward()  # type: ignore[no-untyped-call]
    assert live.largest <= 2 * most < 4 * length * length / 20
    assert len([*steps(q[0], k[0], positions[0])]) < len(q[0])
