"""All ranks in one process: the real plans, programs, kernels and wire format against dense float64 attention."""

from __future__ import annotations

import random

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.request import Request
from tests.support.arguments import arguments
from tests.support.cases import TOLERANCE, Case, case, positions
from tests.support.close import assert_close
from tests.support.support_rows import helped_by_causal_masks_only
from tests.support.support_rows import mask as mask_column
from tests.support.support_rows import schedule as schedule_row
from tests.support.together import backward_together, forward_together, prepare_together

SCHEDULES = (
    ("ring", "contiguous"),
    ("balanced", "contiguous"),
    ("balanced_shared", "contiguous"),
    ("auto", "zigzag"),
)
MASKS = {"causal": (True, (-1, -1)), "full": (False, (-1, -1)), "window": (True, (7, 0)), "two sides": (False, (5, 3))}


def run(request: Request, whole: Case, ranks: int, layout: str) -> None:
    """Compare outputs, lse and gradients of every rank."""
    length, dtype = whole.out.shape[1], whole.dout.dtype
    where = positions(layout, length, ranks)

    def shards(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:, rows] for rows in where]

    inputs = [shards(x) for x in whole.inputs]
    prepared = prepare_together(request, *inputs)
    results = forward_together(prepared, *inputs)
    outs, lses = [out for out, _ in results], [lse for _, lse in results]
    gradients = backward_together(prepared, shards(whole.dout), *inputs, outs, lses)
    tolerance = TOLERANCE[dtype]
    for rank, rows in enumerate(where):
        assert outs[rank].dtype == dtype
        assert_close(outs[rank], whole.out[:, rows], tolerance=tolerance, name=f"out of rank {rank}")
        assert_close(lses[rank], whole.lse[:, :, rows], tolerance=tolerance, name=f"lse of rank {rank}")
    for at, name in enumerate(("dq", "dk", "dv")):
        got = torch.empty_like(whole.gradients[at])
        for rows, shard in zip(where, gradients, strict=True):
            got[:, rows] = shard[at].double()
        assert_close(got, whole.gradients[at], tolerance=4 * tolerance, name=name)


@pytest.mark.support("schedules", schedule_row, mask_column, refuses=helped_by_causal_masks_only)
@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("schedule", "layout"), SCHEDULES)
def test_every_schedule_is_exact_on_odd_and_even_ranks(schedule: str, layout: str, mask: str) -> None:
    causal, window = MASKS[mask]
    served = 0
    for ranks in (1, 2, 3, 4, 5, 7, 8):
        local = 2 * random.Random(f"{schedule} {mask} {ranks}").randrange(2, 6)
        whole = case(ranks * local, causal=causal, window_size=window, softmax_scale=0.3, seed=ranks)
        request = Request(
            **arguments(
                softmax_scale=0.3,
                causal=causal,
                window_size=window,
                schedule=schedule,
                layout=layout,
                kernel="reference",
            )
        )
        try:
            run(request, whole, ranks, layout)
        except UnsupportedError:
            assert schedule.startswith("balanced")
            assert mask in ("full", "two sides")
            continue
        served += 1
    assert served >= (1 if mask in ("full", "two sides") else 7)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (33, 33), (2, 2), (6, 2)])
def test_every_dtype_and_head_count_is_exact_to_rounding(
    heads: int, kv_heads: int, dtype: torch.dtype, kernel: str
) -> None:
    ranks = 4 if heads != 33 else 3
    head_dim = 16 if heads == 33 else 32
    whole = case(ranks * 14, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, seed=heads)
    run(Request(**arguments(softmax_scale=head_dim**-0.5, kernel=kernel)), whole, ranks, "contiguous")


@pytest.mark.parametrize("local", [1, 2, 3, 7, 11])
def test_local_lengths_need_not_be_even(local: int) -> None:
    for ranks in (2, 3, 4):
        if local == 1 and ranks != 3:
            continue  # half a token cannot be shared: auto takes `balanced` there, see below
        run(
            Request(**arguments(softmax_scale=0.25, kernel="reference")),
            case(ranks * local, seed=local),
            ranks,
            "contiguous",
        )


def test_one_token_per_rank_works_on_an_even_number_of_ranks() -> None:
    for schedule in ("auto", "ring", "balanced"):
        run(
            Request(**arguments(softmax_scale=0.25, schedule=schedule, kernel="reference")),
            case(4, seed=3),
            4,
            "contiguous",
        )


@pytest.mark.support("runtime", "either backward payload, delta or out")
@pytest.mark.parametrize("reads", ["delta", "out"])
def test_both_backward_payloads_give_the_same_gradients(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = "reference" if reads == "delta" else "cpu"
    request = Request(**arguments(softmax_scale=0.25, kernel=kernel))
    whole = case(40)
    prepared = prepare_together(request, *([x[:, r * 10 : r * 10 + 10] for r in range(4)] for x in whole.inputs))
    assert prepared[0].format.backward_needs == reads
    run(request, whole, 4, "contiguous")


@pytest.mark.support("runtime", '`wire_dtype="float32"`')
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_wire_is_wider_and_more_exact_than_a_narrow_one(dtype: torch.dtype) -> None:
    """Ring's dk and dv travel from rank to rank and are rounded at each on a narrow wire."""
    whole = case(6 * 16, dtype=dtype, head_dim=32)
    shards = [[x[:, r * 16 : r * 16 + 16] for r in range(6)] for x in (*whole.inputs, whole.dout)]
    errors, sizes = {}, {}
    for wire in ("input", "float32"):
        request = Request(**arguments(softmax_scale=32**-0.5, wire_dtype=wire, schedule="ring"))
        prepared = prepare_together(request, *shards[:3])
        outs, lses = zip(*forward_together(prepared, *shards[:3]), strict=True)
        gradients = zip(*backward_together(prepared, shards[3], *shards[:3], outs, lses), strict=True)
        off = [torch.cat(got, 1).double() - want for got, want in zip(gradients, whole.gradients, strict=True)]
        errors[wire], sizes[wire] = [float(x.norm()) for x in off], sum(p.backward.message_bytes for p in prepared)
    assert errors["float32"][0] <= errors["input"][0], "dq stays at home"
    for wide, narrow in zip(errors["float32"][1:], errors["input"][1:], strict=True):
        assert wide < 0.85 * narrow
    # k and v go round in q's dtype, dk and dv in the wire's.
    assert sizes["float32"] == 1.5 * sizes["input"]


def test_large_scores_neither_overflow_nor_lose_rows() -> None:
    whole = case(48, softmax_scale=40.0)
    run(Request(**arguments(softmax_scale=40.0, kernel="reference")), whole, 4, "contiguous")
