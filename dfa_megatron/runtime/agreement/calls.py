"""The numbered calls of one group on this rank: every rank must run the same ones in the same order.

A call has a number and a digest of its content. `chain` combines all digests so far. Two ranks that once ran different
calls have different chains from then on, so comparing the chain of any later call is enough.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dfa_megatron.errors import DistAttentionError, LostGroupError, UnsupportedError
from dfa_megatron.kernels.current_stream import current_stream

KEPT = 4096
"""Calls that a rank remembers: more than ranks can be apart."""

_MASK = (1 << 63) - 1
_ODD = 0x5851F42D4C957F2D


@dataclass(frozen=True, slots=True)
class Kind:
    """The content of a call: `digest` (63 bits) identifies it, `text` describes it in messages."""

    digest: int
    text: str

    @classmethod
    def of(cls, text: str, *facts: str) -> Kind:
        """Return the kind with that text; the digest covers `facts`, too."""
        digest = hashlib.sha256("\n".join((text, *facts)).encode()).digest()
        return cls(int.from_bytes(digest[:8], "big") & _MASK, text)


PREPARE = Kind.of("prepares an attention that it has not run before")
BACKWARD_ENDS = Kind.of("has come to the end of the backward")


class Call(NamedTuple):
    """A call: its number from 1 on, the digest of its kind, and the chain of all digests up to it."""

    number: int
    digest: int
    chain: int


class _Layer(threading.local):
    number = 0


_LAYER = _Layer()


def at_layer(number: int) -> AbstractContextManager[None]:
    """Mark attentions called inside as those of one layer, so that ranks can compare layers of equal shape.

    number: from 1 on. Under torch.compile the mark is ignored.
    """
    return nullcontext() if torch.compiler.is_compiling() else AtLayer(number)


class AtLayer:
    """The same in eager code. A class, because a generator costs the host twice the time."""

    __slots__ = ("_before", "_number")

    def __init__(self, number: int) -> None:
        self._number = self._before = number

    def __enter__(self) -> None:
        self._before, _LAYER.number = _LAYER.number, self._number

    def __exit__(self, *_: object) -> None:
        _LAYER.number = self._before


current_layer: Callable[[], int] = functools.partial(getattr, _LAYER, "number")
"""Return the layer that calls belong to now; 0 outside of `at_layer`. Each call asks, without a frame of Python."""


class Calls:
    """The calls of this rank over a group, its present state, and the error that lost the group.

    Attributes:
        last: the call that began last.
        doing: text of the call that is running, "" outside of attention.
        lost: the error that lost the group, if one did. told: whether the caller has seen it.
        where: returns the step that runs and the ranks that it waits for, if a transport can tell.
        pending: returns whether the device still works on a call that the host has issued.
        when_lost: called once, when the group is lost.
    """

    def __init__(self) -> None:
        self.last = Call(0, 0, 0)
        self.doing = ""
        self.lost: DistAttentionError | None = None
        self.told = False
        self.where: Callable[[], tuple[int, tuple[int, ...]]] | None = None
        self.pending: Callable[[], bool] = _never
        self.issued: Callable[[], None] | None = None
        self.when_lost: Callable[[], object] = _never
        self._log = [self.last] * KEPT
        self._texts: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._caller: threading.Thread | None = None

    def add(self, kind: Kind, layer: int = 0) -> Call:
        """Count a call of that kind. Raises the error that lost the group, if one did."""
        if self.lost is not None:
            self.check()
        digest = kind.digest ^ (layer * _ODD & _MASK)
        if digest not in self._texts:
            self._texts[digest] = kind.text + (f", layer {layer}" if layer else "")
        last = self.last
        call = Call(last.number + 1, digest, ((last.chain ^ digest) * _ODD + 1) & _MASK)
        self._log[call.number % KEPT] = call
        self.last = call
        return call

    def begin(self, kind: Kind, layer: int = 0) -> Call:
        """Begin a call; `end` or `fail` follows."""
        self.enter(kind.text)
        try:
            return self.add(kind, layer)
        except BaseException:
            self.doing = ""
            raise

    def end(self) -> None:
        """End a call that has been issued. If the group was lost meanwhile, raise instead of returning a result."""
        if self.issued is not None:
            self.issued()
        self.doing = ""
        if self.lost is not None:
            self.check()

    def fail(self, error: BaseException) -> None:
        """Mark the group as lost: the other ranks are still inside of the call that failed here."""
        self.lose(error, told=True)
        self.doing = ""

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Show the watcher a wait for other ranks that is not a call."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    def enter(self, doing: str) -> None:
        """Claim the group's calls for this thread.

        Raises:
            UnsupportedError: another thread is inside of a call, or has made the calls so far. Their order would be
                left to chance, and ranks would mix them up.
        """
        me = threading.current_thread()
        owner, autograd = self._thread, isinstance(me, threading._DummyThread)
        if owner is None or (owner is not me and not autograd and not owner.is_alive() and not self.doing):
            self._thread = owner = me
        if self.doing or (owner is not me and not autograd):
            error = UnsupportedError(
                f"attention over one group from two threads, {owner.name!r} and {me.name!r}",
                "the ranks would run their calls in different orders",
                "one thread for all calls of a group, or a group for each thread",
            )
            self.lose(error, told=False)
            raise error
        self.doing, self._caller = doing, me

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the preparation of a new attention as a call; an error in it does not lose the group."""
        self.enter(PREPARE.text)
        try:
            self.add(PREPARE)
            yield
        finally:
            self.doing = ""

    def on_device(self, device: torch.device) -> None:
        """Let `pending` follow the device too, which works on after the host has issued a call."""
        done, others, others_pend = torch.cuda.Event(), self.issued, self.pending

        def issued() -> None:
            if others is not None:
                others()
            if not torch.cuda.is_current_stream_capturing():
                done.record(current_stream(device))

        self.issued, self.pending = issued, lambda: others_pend() or not done.query()

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """The thread that makes the calls, and the one of the last: autograd's, in a backward on a GPU."""
        return tuple({thread for thread in (self._thread, self._caller) if thread is not None})

    @property
    def thread(self) -> str:
        """Return the name of the thread that makes the calls."""
        return (self._thread or threading.current_thread()).name

    def lose(self, error: BaseException, *, told: bool) -> None:
        """Mark the group as lost. told: the caller has seen the error already."""
        if self.lost is None:
            if not isinstance(error, DistAttentionError):
                error = LostGroupError(f"{type(error).__name__}: {error}")
            self.lost, self.told = error, told
            self.when_lost()

    def check(self) -> None:
        """Raise the error that lost the group, or a LostGroupError that quotes it once the caller has seen it."""
        if self.lost is None:
            return
        if not self.told:
            self.told = True
            raise self.lost
        raise LostGroupError(
            f"this process group was lost after {self.last.number} calls of attention and takes no more: start the "
            f"processes again. The error that lost it: {self.lost}"
        ) from self.lost

    def at(self, number: int) -> Call | None:
        """Return the call of that number, or None if it is forgotten."""
        call = self._log[number % KEPT]
        return call if call.number == number else None

    def recent(self, count: int) -> list[tuple[int, str]]:
        """Return (number, text) of the last calls."""
        last = self.last.number
        found = (self.at(number) for number in range(max(1, last - count + 1), last + 1))
        return [(call.number, self._texts[call.digest]) for call in found if call is not None]

    def token(self, captured: bool) -> int:
        """Return a token (32 bits, not 0) of the running call, equal on all ranks; 1 outside of calls.

        captured: for a CUDA graph. Later calls of the same kind replay it, so the token depends on the kind alone.
        """
        if not self.doing:
            return 1
        return ((self.last.digest if captured else self.last.chain) & 0xFFFFFFFF) or 1


def _never() -> bool:
    return False
