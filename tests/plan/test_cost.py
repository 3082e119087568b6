"""Costs: bytes per rank equal the published tables, idle shares their closed forms, and a timeline keeps its rules."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import Timeline, simulate
from dfa_megatron.plan.cost.hardware import CPU_LOOPBACK, H200_SLOW_LINK, IDEAL_LINK, Hardware, Link, flat
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.language.mask import causal, full
from dfa_megatron.plan.language.sizes import Sizes
from tests.support.plan_cases import WAYS, plan_of

TOKENS = 16


def units(plan: Plan, needs: str = "out") -> tuple[list[float], list[float]]:
    """Sent and received per rank in units of one rank's q: lse and delta left out."""
    shape = Sizes(heads=8, kv_heads=8, head_dim=1 << 20, backward_needs=needs)  # type: ignore[arg-type]
    unit = plan.mask.length // plan.ranks * sum(shape.row_bytes("q"))
    timeline = simulate(plan, shape)
    sent, received = ([round(nbytes / unit, 3) for nbytes in of] for of in (timeline.sent, timeline.received))
    return sent, received


@pytest.mark.parametrize(
    ("ranks", "phase", "needs", "sent"),
    [
        (8, "forward", "out", [11, 10, 9, 8, 6, 5, 4, 3]),
        (7, "forward", "out", [9, 8, 7, 6, 5, 4, 3]),
        (8, "backward", "out", [11, 12, 13, 14, 14, 15, 16, 17]),
        (7, "backward", "out", [9, 10, 11, 12, 13, 14, 15]),
        (8, "backward", "delta", [11, 12, 13, 14, 14, 14, 14, 14]),
        (7, "backward", "delta", [9, 10, 11, 12, 12, 12, 12]),
    ],
)
def test_balanced_moves_the_bytes_of_the_published_table(ranks: int, phase: str, needs: str, sent: list[int]) -> None:
    plan = getattr(plan_of("balanced", causal(ranks * TOKENS), ranks), phase)
    assert units(plan, needs=needs) == (sent, sent[::-1])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_shared_far_pair_moves_half_a_chunk_of_rows_to_its_helper_and_their_results_back(ranks: int) -> None:
    """Forward: half of q out and half of out back. Backward: half of q, dout and out, and half of dq back."""
    mask = causal(ranks * TOKENS)
    plain, shared = plan_of("balanced", mask, ranks), plan_of("balanced_shared", mask, ranks)
    for phase, more in (("forward", 1.0), ("backward", 2.0)):
        (before, _), (after, _) = units(getattr(plain, phase)), units(getattr(shared, phase))
        assert sum(after) - sum(before) == more * ranks / 2


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_full_ring_moves_every_key_past_every_rank(ranks: int) -> None:
    ring = plan_of("ring", full(ranks * TOKENS), ranks)
    assert units(ring.forward) == ([2 * (ranks - 1)] * ranks,) * 2
    assert units(ring.backward) == ([4 * (ranks - 1)] * ranks,) * 2


def test_a_name_weighs_what_its_fields_weigh() -> None:
    shape = Sizes(batch=2, heads=6, kv_heads=3, head_dim=8, head_dim_v=4)
    q, k, v, o, statistic = 6 * 8 * 2, 3 * 8 * 2, 3 * 4 * 2, 6 * 4 * 2, 6 * 4
    one = {"q": q, "kv": k + v, "out": o + statistic, "qdo": q + o + statistic + o, "dq": q, "dkv": k + v}
    assert {name: sum(shape.row_bytes(name)) for name in one} == {name: 2 * nbytes for name, nbytes in one.items()}
    with pytest.raises(ValueError, match="no name 'x' travels"):
        shape.row_bytes("x")


# Time.


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 17])
def test_compute_alone_uses_the_ranks_as_the_closed_forms_say(ranks: int) -> None:
    mask = causal(ranks * 2 * 4096)
    even = ranks % 2 == 0
    wanted = {
        "balanced": ranks / (ranks + 1) if even else 1.0,
        "balanced_shared": 1.0,
        "zigzag": 1.0,
        "ring": ranks / (2 * ranks - 1),
    }
    for schedule, share in wanted.items():
        plan = plan_of(schedule, mask, ranks)
        for phase in (plan.forward, plan.backward):
            assert simulate(phase, hardware=IDEAL_LINK).idle_share == pytest.approx(1 - share, abs=2e-4)


def spans(timeline: Timeline, rank: int, kind: str) -> list[tuple[float, float]]:
    return sorted((e.start, e.end) for e in timeline.events if (e.rank, e.kind) == (rank, kind))


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("hardware", [H200_SLOW_LINK, CPU_LOOPBACK])
def test_a_rank_computes_sends_and_receives_one_thing_at_a_time(schedule: str, hardware: Hardware) -> None:
    timeline = simulate(plan_of(schedule, causal(8192), 8), Sizes(kv_heads=8), hardware)
    for rank in range(8):
        for kind in ("compute", "send", "receive"):
            for (_, end), (start, _) in pairwise(spans(timeline, rank, kind)):
                assert end <= start * (1 + 1e-12)
        assert sum(b - a for a, b in spans(timeline, rank, "compute")) == pytest.approx(timeline.busy[rank])
        assert timeline.busy[rank] <= timeline.makespan
    assert max(e.end for e in timeline.events) == pytest.approx(timeline.makespan)
    assert sum(timeline.busy) / (8 * timeline.makespan) == pytest.approx(1 - timeline.idle_share)


def test_a_message_occupies_both_ends_for_its_bytes() -> None:
    timeline = simulate(plan_of("balanced", causal(4096), 4).forward, Sizes(), H200_SLOW_LINK)
    sends = {(e.rank, e.peer, e.step): (e.start, e.end) for e in timeline.events if e.kind == "send"}
    receives = {(e.peer, e.rank, e.step): (e.start, e.end) for e in timeline.events if e.kind == "receive"}
    assert sends == receives
    for e in timeline.events:
        if e.kind == "send":
            took = H200_SLOW_LINK.link.latency + e.nbytes / H200_SLOW_LINK.link.bytes_per_second
            assert e.end - e.start == pytest.approx(took)


def test_nothing_is_computed_before_what_it_reads_has_landed() -> None:
    plan = plan_of("balanced", causal(4096), 4).forward
    timeline = simulate(plan, Sizes(), H200_SLOW_LINK)
    landed = {(t.dst, t.what, t.chunk): t.step for t in plan.transfers}
    came = [r for r in timeline.events if r.kind == "receive"]
    for e, b in ((event, block) for event in timeline.events for block in event.blocks):
        for name, chunk in (("q", b.q_chunk), ("kv", b.kv_chunk)):
            if plan.layout.owner[chunk] != b.rank:
                place = b.rank, landed[b.rank, name, chunk]
                assert e.start >= max(r.end for r in came if (r.rank, r.step) == place)


def test_a_slower_link_never_makes_a_run_faster() -> None:
    for schedule in WAYS:
        plan = plan_of(schedule, causal(8192), 4)
        times = [
            simulate(plan, hardware=Hardware("links", flat(6e14), flat(5e14), Link(rate))).makespan
            for rate in (math.inf, 1e12, 1e11, 1e10)
        ]
        assert times == sorted(times)


# Bad values.


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"heads": 0}, "heads=0"),
        ({"heads": 6, "kv_heads": 4}, "6 heads with 4 kv_heads"),
        ({"head_dim_v": -1}, "value_dim=-1"),
        ({"backward_needs": "nothing"}, "backward_needs='nothing'"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        Sizes(**sizes)  # type: ignore[arg-type]
