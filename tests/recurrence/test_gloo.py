"""Recurrences and convolutions between processes over gloo: exact, agreed on, counted, and sent once with remat."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dfa_megatron import remat
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.layouts import Layout, contiguous, of_lengths
from dfa_megatron.recurrence import Scan, dist_conv, dist_scan
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.close import assert_close
from tests.support.packs import random_offsets
from tests.support.plan_cases import some_parents
from tests.support.recurrences import (
    KINDS,
    Recurrence,
    by_path,
    convolve,
    forest,
    recurrence,
    rows_of,
    uneven,
    with_empty,
)
from tests.support.workers import over_ranks

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4}


def compare(
    whole: Recurrence,
    rank: int,
    ranks: int,
    offsets: tuple[int, ...] | None = None,
    parents: Sequence[int] = (),
    layout: Layout | str = "contiguous",
    around: Callable[[Callable[[], torch.Tensor]], torch.Tensor] = lambda run: run(),
) -> None:
    """One forward and backward of this rank's tokens, compared with its rows of one process's."""
    parts = contiguous(whole.dout.shape[1], ranks) if isinstance(layout, str) else layout
    tokens, rows = whole.rows(rank, ranks, parts), rows_of(parts, rank)
    where: Any = {"cu_seqlens": offsets, "parents": parents, "layout": layout}
    out = around(lambda: dist_scan(whole.scan, tokens, decay=whole.decay(tokens), **where)[0])
    wanted, of_tokens = whole.whole(offsets or (), parents)
    tolerance = TOLERANCE[out.dtype]
    assert_close(out, wanted[:, rows], tolerance=tolerance, name="out")
    for name, got in zip(tokens, torch.autograd.grad(out, list(tokens.values()), whole.dout[:, rows]), strict=True):
        assert_close(got, of_tokens[name][:, rows], tolerance=8 * tolerance, name=f"gradient of {name}")


@over_ranks(1, 2, 5)
def test_every_recurrence_its_packs_and_its_trees_are_exact_over_gloo(rank: int, ranks: int) -> None:
    """Packs with documents of one token and of none; children begin with the state after their parent."""
    draw = random.Random(ranks)
    for seed, kind in enumerate(KINDS):
        compare(recurrence(kind, 3 * ranks, seed=9, dtype=torch.float32), rank, ranks)
        compare(recurrence(kind, 5 * ranks, seed=seed), rank, ranks)
        compare(recurrence(kind, 7, seed=seed), rank, ranks, layout=uneven(7, ranks, draw))
        length = 4 * ranks + seed % 3
        packed = recurrence(kind, length, seed=seed, packs=bool(seed % 2))
        for offsets in (with_empty(random_offsets(length, draw), draw), (0, 1, length), tuple(range(length + 1))):
            compare(packed, rank, ranks, offsets, (), draw.choice(["contiguous", uneven(length, ranks, draw)]))
        fan = (*range(0, 4 * ranks, 2), length), [-1, 0, *[1] * (2 * ranks - 3), 0][: 2 * ranks]
        for tree in (fan, *(forest(length, draw, most=8) for _ in range(2))):
            compare(packed, rank, ranks, *tree, draw.choice(["contiguous", uneven(length, ranks, draw)]))


@over_ranks(3)
def test_a_plain_checkpoint_of_a_recurrence_alone_recomputes_on_every_rank_first(rank: int, ranks: int) -> None:
    for seed, kind in enumerate(KINDS):
        for offsets, parents in ((None, ()), ((0, 2, 7, 4 * ranks), [-1, 0, 0])):
            whole = recurrence(kind, 4 * ranks, seed=seed)
            compare(whole, rank, ranks, offsets, parents, around=partial(checkpoint, use_reentrant=False))
        rows = rows_of(contiguous(4 * ranks, ranks), rank)
        for name, wanted in whole.whole()[1].items():  # those that no state depends on send nothing back
            mine = {key: x.detach().requires_grad_(key == name) for key, x in whole.rows(rank, ranks).items()}
            out = checkpoint(lambda tokens=mine, scan=whole.scan: dist_scan(scan, tokens)[0], use_reentrant=False)
            (got,) = torch.autograd.grad(out, mine[name], whole.dout[:, rows])
            assert_close(got, wanted[:, rows], tolerance=1e-10, name=f"gradient of {name} alone")


@over_ranks(3, timeout=60)
def test_a_loss_may_read_the_final_state_alone(rank: int, ranks: int) -> None:
    """A loss of the last state alone, as a classifier has it; the others' results have no value in it."""
    length = 4 * ranks
    for seed, kind in enumerate(KINDS):
        # The second document starts inside of the last rank but one; the last segment continues the first.
        packs = ((0, length), [-1]), ((0, length - 6, length), [-1, -1]), ((0, 3, 9, length), [-1, 0, 0])
        layouts = ((4, 4, 4), (0, 6, 6), (5, 0, 7), (6, 6, 0))
        for at, (offsets, parents) in enumerate(2 * packs):  # each with two layouts
            counts = layouts[(at + seed) % 4]
            whole, layout = recurrence(kind, length, seed=seed), of_lengths(counts)
            mine = whole.rows(rank, ranks, layout)
            where: Any = {"cu_seqlens": offsets, "parents": parents, "layout": layout}
            _, final = dist_scan(whole.scan, mine, decay=whole.decay(mine), **where)
            got = torch.autograd.grad(final.sum() * (rank == ranks - 1), list(mine.values()), allow_unused=True)
            everything = {name: x.clone().requires_grad_() for name, x in whole.tokens.items()}
            above = slice(0, offsets[1] * (parents[-1] == 0))
            path = {name: torch.cat([x[:, above], x[:, offsets[-2] :]], 1) for name, x in everything.items()}
            _, wanted = whole.scan.run(path, None, ())
            if rank == ranks - 1:
                assert_close(final, wanted, tolerance=1e-11, name=f"state of {kind}")
            of_tokens = torch.autograd.grad(wanted.sum(), list(everything.values()), allow_unused=True)
            for name, mine_, theirs in zip(mine, got, of_tokens, strict=True):
                want = torch.zeros_like(everything[name]) if theirs is None else theirs
                have = torch.zeros_like(mine[name]) if mine_ is None else mine_
                rows = want[:, rows_of(layout, rank)]
                assert_close(have, rows, tolerance=1e-10, name=f"gradient of {name} of {kind}")


@over_ranks(4)
def test_a_convolution_reaches_over_ranks_that_hold_fewer_tokens_than_it_is_wide(rank: int, ranks: int) -> None:
    draw = random.Random(7)
    for tokens, width in ((2, 4), (1, 5), (3, 1), (6, 4)):
        length = tokens * ranks + tokens // 2
        torch.manual_seed(tokens)
        x, dout = torch.randn(2, 1 + tokens // 3, length, 3).double().unbind(0)
        weight = torch.randn(3, width).double()
        some = with_empty(random_offsets(length, draw), draw)
        packs = [(offsets, []) for offsets in (None, some, tuple(range(length + 1)))]
        for offsets, parents in (*packs, forest(length, draw), (tuple(range(length + 1)), some_parents(length, draw))):
            everything = x.clone().requires_grad_(), weight.clone().requires_grad_()
            run = convolve(everything[1])
            wanted = by_path(lambda x, run=run: run(x["x"]), {"x": everything[0]}, offsets or (0, length), parents)
            dx, dweight = torch.autograd.grad(wanted, everything, dout)
            layout = draw.choice([contiguous, lambda n, r: uneven(n, r, draw)])(length, ranks)
            rows = rows_of(layout, rank)
            mine, own = x[:, rows].clone().requires_grad_(), weight.clone().requires_grad_()
            where: Any = {"cu_seqlens": offsets, "parents": parents, "layout": layout}
            out = dist_conv(convolve(own), mine, width, packs=bool(tokens % 2), **where)
            assert_close(out, wanted[:, rows], tolerance=1e-11, name="out")
            got, of_weight = torch.autograd.grad(out, (mine, own), dout[:, rows])
            assert_close(got, dx[:, rows], tolerance=1e-10, name="dx")
            torch.distributed.all_reduce(of_weight)
            assert_close(of_weight, dweight, tolerance=1e-10, name="dweight")


def _layer(whole: Recurrence, names: list[str], *tensors: torch.Tensor) -> torch.Tensor:
    tokens = dict(zip(names, tensors, strict=True))
    weight = torch.ones(tokens["v"].shape[3], 3, dtype=tokens["v"].dtype)
    tree: Any = {"cu_seqlens": (0, 2, 3, 7, whole.dout.shape[1]), "parents": [-1, 0, 1, 0]}
    v = dist_conv(convolve(weight), tokens["v"].flatten(2)[..., : weight.shape[0]], 3, **tree)
    tokens["v"] = tokens["v"] + v[:, :, None]
    out, _ = dist_scan(whole.scan, tokens, decay=whole.decay(tokens), **tree)
    return out.tanh()


REGIONS: dict[str, Callable[..., Any]] = {
    "plain": lambda layer, *x: layer(*x),
    "frames": partial(checkpoint, use_reentrant=False, context_fn=remat.context_fn),
    "reentrant": remat.remat_checkpoint,
    "offloaded": partial(checkpoint, use_reentrant=False, context_fn=partial(remat.context_fn, offload=True)),
}


@over_ranks(3)
def test_a_recompute_sends_nothing(rank: int, ranks: int) -> None:
    for kind in ("gated_delta", "gla"):
        whole, first = recurrence(kind, 4 * ranks, seed=1), None
        for name, region in REGIONS.items():
            tokens = whole.rows(rank, ranks)
            COUNTERS.reset()
            out = region(partial(_layer, whole, list(tokens)), *tokens.values())
            out.backward(torch.ones_like(out))  # re-entrant checkpoints take no other
            got, counts = [x.grad for x in tokens.values()], COUNTERS.snapshot()
            first = first or (got, counts)
            assert all(torch.equal(a, b) for a, b in zip(got, first[0], strict=True))
            if kind == "gated_delta":
                assert counts["state_exchanges"] == 4  # two each way
                assert counts["reused"] == (0 if name == "plain" else 2)
                for count in ("state_exchanges", "state_forward_bytes", "state_backward_bytes"):
                    assert counts[count] == first[1][count] > 0


@over_ranks(3)
def test_states_stay_float32_under_autocast(rank: int, ranks: int) -> None:
    for kind in ("gated_delta", "mamba2"):
        whole = recurrence(kind, 4 * ranks, seed=2, dtype=torch.float32)
        tokens = whole.rows(rank, ranks)
        rows = slice(rank * 4, rank * 4 + 4)
        with torch.autocast("cpu", torch.bfloat16):
            out, state = dist_scan(_without_autocast(whole.scan), tokens, decay=whole.decay(tokens))
        gradients = torch.autograd.grad(out, list(tokens.values()), whole.dout[:, rows])
        assert state.dtype == torch.float32
        wanted, of_tokens = whole.whole()
        assert_close(out, wanted[:, rows], tolerance=2e-4, name="out")
        for name, got in zip(tokens, gradients, strict=True):
            assert_close(got, of_tokens[name][:, rows], tolerance=2e-4, name=name)


def _without_autocast(scan: Scan) -> Scan:
    def run(*given: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return scan.run(*given)

    return Scan(run, scan.keys, scan.values)


@over_ranks(3)
def test_only_states_that_cross_ranks_travel_and_m_only_where_they_go_through_one(rank: int, ranks: int) -> None:
    whole = recurrence("gated_delta", 4 * ranks, seed=3)
    for offsets, with_m in ((None, True), (tuple(range(0, 4 * ranks + 1, 4)), None), ((0, 6, 10, 12), False)):
        COUNTERS.reset()
        with torch.no_grad():
            dist_scan(whole.scan, whole.rows(rank, ranks), cu_seqlens=offsets)
        state, m = 2 * 2 * 3 * 4 * 8, 2 * 2 * 3 * 3 * 8
        assert COUNTERS.state_forward_bytes == (0 if with_m is None else state + m * with_m)


@over_ranks(2)
def test_ranks_that_disagree_get_a_readable_error(rank: int, ranks: int) -> None:
    whole = recurrence("gla", 4 * ranks, seed=3)
    x = whole.rows(rank, ranks)

    def scan(decay: bool = True, x: Any = x, **where: Any) -> None:
        dist_scan(whole.scan, x, decay=whole.decay(x) if decay else None, group=group, **where)

    def conv() -> None:
        dist_conv(lambda x, _: x, x["v"].flatten(2), 3, group=group)

    known = partial(scan, cu_seqlens=(0, 5, 8))
    cases: list[tuple[str, Callable[[], object]]] = [
        ("cu_seqlens (0, 6, 8) on rank 0", lambda: [known(), scan(cu_seqlens=(0, 5, 8) if rank else (0, 6, 8))]),
        ("parents -1,0,1", lambda: scan(cu_seqlens=(0, 2, 6, 8), parents=[-1, 0, 0] if rank else [-1, 0, 1])),
        (
            "the parent of segment 1 is -1, 0 or an ancestor of 0, got 1",
            lambda: scan(cu_seqlens=(0, 2, 8), parents=[-1, 1] if rank else [-1, 0]),
        ),
        ("convolution", lambda: [scan(), conv(), (scan if rank else conv)()]),
        ("(2, 2, 3, 1), elementwise", lambda: scan(decay=bool(rank))),
        ("tokens of a rank: 4 on rank 0; 3 on rank 1", lambda: scan(x={name: t[:, rank:] for name, t in x.items()})),
        ("4 tokens on rank 0 of a sequence that gives it 3", lambda: scan(cu_seqlens=(0, 5, 8) if rank else (0, 5, 6))),
        ("'contiguous', or layouts.of_lengths", lambda: scan(layout="zigzag" if rank else "contiguous")),
    ]
    for told, disagree in cases:
        group = torch.distributed.new_group(range(ranks))
        with pytest.raises((DisagreementError, UnsupportedError)) as error:
            disagree()
        assert told in str(error.value), told
