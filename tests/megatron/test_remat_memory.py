"""A hundred steps of every kind through Megatron's layers leave no frame, no region and no tensor behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from dfa_megatron import remat
from dfa_megatron.remat import saved as kept
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import TWO, like
from tests.support.live_bytes import living
from tests.support.workers import run_ranks

STEPS = 98
KINDS = ("train", "evaluate", "frozen layer", "frozen embedding", "fails forward", "fails in the recompute", "re-run")


ROW = like("plain")


class Failing(torch.nn.Module):
    """An MLP that raises when it is told to, after its layer's attention has run."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.when = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        passed = "fails in the recompute" if torch.is_grad_enabled() else "fails forward"
        if self.when == passed:
            raise ZeroDivisionError(passed)
        return self.mlp(*args, **kwargs)


def loss_of(model: Any, step: int) -> torch.Tensor:
    batch = ROW.global_batch(step % 8)[0]
    loss: torch.Tensor = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()
    return loss


def rerun(model: Any, step: int) -> None:
    """A step under Megatron's re-run state machine, which runs it again because its result is rejected."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    machine = get_rerun_state_machine()
    losses = []
    while machine.should_run_forward_backward(None):
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, step)
        loss.backward()
        machine.validate_result(loss.detach(), rejection_func=lambda _: True, message="asked for", fatal=False)
        losses.append(loss.item())
    machine.should_checkpoint_and_exit()
    assert len(losses) == (1 if step == KINDS.index("re-run") else 2), "the machine judges from the second step on"
    assert losses[0] == losses[-1]


def a_step(model: Any, step: int) -> None:
    kind = KINDS[step % len(KINDS)]
    layers = model.decoder.layers
    layers[1].mlp.when = kind
    model.requires_grad_(True)
    if kind == "frozen layer":
        layers[1].requires_grad_(False)
    if kind == "frozen embedding":
        model.embedding.requires_grad_(False)
    model.train(kind != "evaluate")
    if kind == "evaluate":
        with torch.no_grad():
            loss_of(model, step)
    elif kind == "re-run":
        rerun(model, step)
    else:
        with contextlib.suppress(ZeroDivisionError):
            loss_of(model, step).backward()
            assert not kind.startswith("fails")
    model.zero_grad(set_to_none=True)


def many_steps(rank: int, world_size: int, offload: bool) -> None:
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine

    row = like("plain", checkpoint="remat", config=TWO, options={"remat_offload": offload})
    harness.start(row)
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    model = harness.model_of(row)
    for layer in model.decoder.layers:
        layer.mlp = Failing(layer.mlp)
    counts = []
    COUNTERS.reset()
    for step in range(STEPS):
        a_step(model, step)
        if step in (4 * len(KINDS), STEPS - 1):
            counts.append(living())
    assert COUNTERS.replays > STEPS
    assert kept._lane.cache_info().currsize == offload, "the option has reached the layers"
    assert counts[0] == counts[1]
    assert (counts[1]["frames"], counts[1]["regions"], counts[1]["pairs"]) == (0, 0, 0)
    assert remat.active_frame() is None


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "in host memory"])
def test_a_hundred_steps_of_every_kind_leave_nothing_behind(offload: bool) -> None:
    run_ranks(1, many_steps, offload, timeout=120)
