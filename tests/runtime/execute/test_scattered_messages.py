"""Messages whose rows lie apart: no schedule of today sends one, and the plan language allows them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dfa_megatron.plan.language.ir import BACKWARD, FORWARD, Block, Phase, Plan
from dfa_megatron.plan.language.layout import Layout, cut
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.lowering.kernel_calls import ANY
from dfa_megatron.plan.lowering.lower import lower_all
from dfa_megatron.plan.schedules.assignments import direct
from dfa_megatron.runtime.execute.memory import placed
from dfa_megatron.runtime.request import Request
from tests.support.arguments import arguments
from tests.support.attend import (
    Results,
    assert_exact,
    backward_together,
    case,
    forward_together,
    prepare_together,
    shares,
)

LENGTH = 30


def thirds(ranks: int) -> Layout:
    """Three chunks a rank, in order."""
    return Layout(cut(LENGTH, 3 * ranks), tuple(chunk // 3 for chunk in range(3 * ranks)))


def outer_thirds_first(phase: Phase, ranks: int = 2) -> Plan:
    """A rank takes the first and the last third of another's keys in one step, and the middle third in the next."""
    layout = thirds(ranks)
    blocks = [
        Block(0 if layout.owner[q] == layout.owner[kv] else 1 + kv % 3 % 2, layout.owner[q], q, kv)
        for q in range(3 * ranks)
        for kv in range(q + 1)
    ]
    return Plan(causal(LENGTH), layout, phase, tuple(sorted(blocks)), direct(blocks, layout, phase))


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_that_lie_apart_travel_as_one_message(batch: int) -> None:
    phases = [outer_thirds_first(phase) for phase in (FORWARD, BACKWARD)]
    forward = lower_all(phases[0], batch)[0]
    assert any(len(part) == 2 for message in forward.sends for part in message.parts), "two regions in one part"
    whole = case(LENGTH, batch=batch)

    def shards(x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.split(LENGTH // 2, dim=1))

    inputs = [shards(x) for x in whole.inputs]
    prepared = [
        dataclasses.replace(
            one,
            forward=placed(phases[0], rank, one.forward.sizes, ANY),
            backward=placed(phases[1], rank, one.forward.sizes, ANY),
        )
        for rank, one in enumerate(
            prepare_together(Request(**arguments(softmax_scale=0.25, kernel="reference")), *inputs)
        )
    ]
    outs, lses = zip(*forward_together(prepared, *inputs), strict=True)
    gradients = backward_together(prepared, shards(whole.dout), *inputs, outs, lses)
    dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*gradients, strict=True))
    assert_exact(shares(whole, Results(torch.cat(outs, 1), torch.cat(lses, 2), dq, dk, dv)))
