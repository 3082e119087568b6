"""Ablations as in the paper: measure the cost of overlap and communication by leaving one out. For measurement only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal
from unittest import mock

from dfa_megatron.runtime import run
from dfa_megatron.runtime.comm.transport import Recv, Sends, Transport
from dfa_megatron.runtime.execute.memory import Fields, MemoryPlan
from dfa_megatron.runtime.prepare import Prepared

logger = logging.getLogger(__name__)

Ablation = Literal["none", "no_overlap", "no_communication"]


@contextmanager
def ablation(name: Ablation) -> Iterator[None]:
    """Leave out overlap or communication of every distributed attention of this process inside; set it on all ranks.

    no_overlap: compute and messages take turns. no_communication: nothing is sent, and results are WRONG.
    """
    if name == "no_communication":
        logger.warning("communication is left out: every distributed attention gives wrong results")
    drives = {"no_overlap": _InTurn, "no_communication": lambda _: Transport()}
    with nullcontext() if name == "none" else as_it_stands(drives[name]):
        yield


@contextmanager
def as_it_stands(drive: Callable[[Transport], Transport] = lambda transport: transport) -> Iterator[None]:
    """Run every attention inside without replays. drive: returns what drives the messages in place of a transport."""

    def run_it(prepared: Prepared, memory: MemoryPlan, inputs: Fields) -> Fields:
        transport, arena = run._way(prepared, memory, inputs[0].device)
        return run._run(prepared, memory, inputs, arena, drive(transport))

    with mock.patch.object(run, "_run_or_replay", run_it):
        yield


class _InTurn(Transport):
    """Let messages wait for all compute issued before them, and compute for the messages."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.last = inner, -1

    def start(self) -> None:
        self.inner.start()

    def post(self, after: int, sends: Sends, receives: Sequence[Recv]) -> None:
        self.inner.post(self.last, sends, receives)
        self.inner.land()

    def land(self) -> None:
        """Do nothing: the batch has landed already."""

    def computed(self, step: int) -> None:
        self.last = step
        self.inner.computed(step)

    def finish(self) -> None:
        self.inner.finish()
