"""Ablations, as the paper's: what overlap and communication cost, by leaving one out. For measurements only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.runtime.comm.communicator import Parcel
from dfa_megatron.runtime.comm.transport import Around, Transport
from dfa_megatron.runtime.execute.tensors import Tensors
from dfa_megatron.runtime.hooks import hooked

logger = logging.getLogger(__name__)

Ablation = Literal["none", "no_overlap", "no_communication"]
ABLATIONS: tuple[Ablation, ...] = ("none", "no_overlap", "no_communication")


@contextmanager
def ablation(name: Ablation) -> Iterator[None]:
    """Leave out overlap or communication of every distributed attention of this process inside; set it on all ranks.

    no_overlap: compute and messages take turns. no_communication: nothing is sent, and results are WRONG.

    Raises:
        UnsupportedError: there is no such ablation.
    """
    if name not in ABLATIONS:
        raise UnsupportedError(f"ablation {name!r}", "there is no such ablation", "one of " + ", ".join(ABLATIONS))
    if name == "no_communication":
        logger.warning("communication is left out: every distributed attention gives wrong results")
    with nullcontext() if name == "none" else hooked(_Ablated(name)):
        yield


class _Ablated:
    """The hook that leaves out overlap or communication."""

    def __init__(self, name: Ablation) -> None:
        self.name: str = name

    def algebra(self, algebra: Tensors, plan: Plan) -> Tensors:
        """As it is."""
        return algebra

    def transport(self, transport: Transport, algebra: Tensors) -> Transport:
        """One that takes turns with compute, or one that sends nothing."""
        return _InTurn(transport) if self.name == "no_overlap" else _Silent(transport)


class _InTurn(Around):
    """Messages wait for all compute that was issued before them, and compute for the messages."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.last = -1

    def start(self) -> None:
        self.last = -1
        self.inner.start()

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        self.inner.post(self.last, sends, receives)
        self.inner.land()

    def land(self) -> None:
        """It has landed already."""

    def computed(self, step: int) -> None:
        self.last = step
        self.inner.computed(step)


class _Silent(Around):
    """Sends nothing: what should have landed is what was in memory."""

    def start(self) -> None:
        """Nothing will move."""

    def post(self, after: int, sends: Callable[[], Sequence[Parcel]], receives: Sequence[Parcel]) -> None:
        """Nothing moves."""

    def land(self) -> None:
        """Nothing has moved."""

    def computed(self, step: int) -> None:
        """Nobody waits."""

    def finish(self) -> None:
        """Nothing was moving."""
