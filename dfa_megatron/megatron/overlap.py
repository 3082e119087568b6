"""Run the parts of a schedule plan, by which Megatron overlaps the messages of experts, within a call of their model.

Megatron builds a plan in the place of a call, and later calls the parts of its layers, and none of their forwards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from dfa_megatron.megatron.tokens.visit import Visit, running

Within = Callable[[], AbstractContextManager[None]]
Returned = Callable[[Any], Any] | None


def run_within(plan: Any, visit: Visit | None, losing: Within, leave: Returned) -> None:
    """Have the parts of a plan find the documents and ranks of their call.

    losing: around the loss. leave: brings what the model returns into the caller's order.
    """
    state = plan.state

    def forget(out: Any) -> Any:
        state.packed_seq_params = None  # the layers know the documents by the visit
        return out

    for each in (plan, *map(plan.get_layer, range(plan.num_layers()))):
        for part in [part for part in vars(each).values() if hasattr(part, "forward_func")]:
            _wrap(part, partial(running, visit), None)
    _wrap(plan.pre_process, nullcontext, forget)
    if plan.post_process is not None:
        _wrap(plan.post_process, losing, leave)


def _wrap(part: Any, within: Within, finish: Returned) -> None:
    run = part.forward_func

    def forward(*args: Any) -> Any:
        with within():
            out = run(*args)
            return out if finish is None else finish(out)

    part.forward_func = forward
