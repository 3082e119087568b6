"""Recorded runs under other states of PyTorch than those of their recording; `tests.fuzz.attempt` draws more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dfa_megatron import masks
from dfa_megatron.recurrence import dist_mamba2, dist_scan, fla_scan
from dfa_megatron.recurrence.token_loop import linear_attention
from dfa_megatron.runtime.prepare import in_use
from tests.fuzz.attempt import Listens, Rounds
from tests.support.attend import attend, case, compare, pack, results
from tests.support.recurrences import recurrence
from tests.support.workers import over_ranks

KINDS: list[dict[str, Any]] = [{"kernel": "reference"}, {"kernel": "reference", "layout": "zigzag"}, {"kernel": "cpu"}]


STATES: dict[str, Callable[[bool], AbstractContextManager[Any]]] = {
    "autocast": lambda on: torch.autocast("cpu", torch.bfloat16, enabled=on),
    "functions": lambda on: Rounds() if on else nullcontext(),
}


def _rounding(rank: int, ranks: int, state: str, where: str) -> None:
    """Also where only a call that is replayed meets it."""
    for options in KINDS if ranks > 1 else ({"kernel": "reference"}, {"kernel": "cpu"}):
        for call in range(6):
            states = [partial(STATES[state], call != 3 and where in (name, "both")) for name in ("forward", "backward")]
            compare(case(8 * ranks, dtype=torch.float32, seed=call), rank, ranks, states=tuple(states), **options)


@pytest.mark.parametrize(
    ("state", "where"), [("autocast", "both"), *(("functions", where) for where in ("forward", "backward", "both"))]
)
def test_a_state_that_rounds_rounds_no_replay(state: str, where: str) -> None:
    _rounding(0, 1, state, where)


@over_ranks(2, timeout=120)
def test_states_that_round_and_a_default_device_change_no_number_over_ranks(rank: int, ranks: int) -> None:
    for state in STATES:
        _rounding(rank, ranks, state, "both")
    whole, packed = case(8 * ranks), pack((0, 3, 8 * ranks))
    for one in (whole, packed):
        compare(one, rank, ranks, states=(partial(torch.device, "meta"),) * 2)


PACK = (0, 5, 12)
WHOLES = {
    "plain": case(12),
    "pack": pack(PACK),
    "mask": case(12, mask=masks.prefix_lm(12, 5)),
    "sinks": case(12, with_sinks=True),
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("whole", WHOLES)
def test_an_evaluation_between_replays_changes_no_number(
    whole: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """What the first call leaves behind, such as tables of documents, serves training afterwards."""
    for kernel, seed in itertools.product(("cpu", "reference"), range(4)):
        one = replace(WHOLES[whole], seed=seed)
        with mode():
            attend(one, *one.shard(0, 1)[0], kernel=kernel)
        compare(one, kernel=kernel)


def test_a_mode_sees_the_operations_of_a_backward_that_is_recorded() -> None:
    """The same in every call."""

    class Counts(Listens):
        seen = 0

        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().__torch_dispatch__(*args, **kwargs)

    for known in in_use():  # of other tests
        known.bound.clear()
    seen = []
    for _ in range(5):
        counts = Counts()
        results(case(8), kernel="reference", states=(nullcontext, lambda counts=counts: counts))
        results(case(8), kernel="reference")
        seen.append(counts.seen)
    assert len(set(seen)) == 1, seen


class Saving(torch.autograd.Function):
    """Passes x on and saves the table for its backward, as kernels of other packages do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.saved_tensors
        return gradient, None


def chunked(initial_state: Any, output_final_state: bool, cu_seqlens: Any = None, **x: torch.Tensor) -> Any:
    out, state = linear_attention(x, initial_state, () if cu_seqlens is None else tuple(cu_seqlens.tolist()))
    return Saving.apply(out, cu_seqlens), state


def mamba(x: Any, dt: Any, a: Any, b: Any, c: Any, *, seq_idx: Any, **_: Any) -> Any:
    out, states = linear_attention({"q": c, "k": b, "v": x * dt[..., None], "g": dt * a}, None, PACK)
    return Saving.apply(out, seq_idx), states.mT


def scan() -> torch.Tensor:
    drawn = recurrence("mamba2", 12, seed=1, packs=True)
    return dist_scan(fla_scan(chunked), drawn.rows(0, 1), cu_seqlens=PACK)[0]


def scan_mamba() -> torch.Tensor:
    x = recurrence("mamba2", 12, seed=1, packs=True).rows(0, 1)
    tokens = {"x": x["v"], "dt": x["g"].abs(), "B": x["k"], "C": x["q"]}
    return dist_mamba2(mamba, tokens, -torch.rand(2, dtype=torch.float64), packs=True, cu_seqlens=PACK)[0]


@pytest.mark.parametrize("call", [scan, scan_mamba])
def test_training_follows_evaluation_in_inference_mode(call: Callable[[], torch.Tensor]) -> None:
    for _ in range(3):
        with torch.inference_mode():
            call()
        call().sum().backward()
