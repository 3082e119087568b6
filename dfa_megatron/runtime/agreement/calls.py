"""The calls of one group on this rank, numbered: what every rank must run in the same order.

A call has a number and a digest of what it runs. `chain` sums up all digests so far, so that two ranks which once ran
different things differ in it for ever: comparing one number of any common call is enough to see it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dfa_megatron.errors import DistAttentionError, LostGroupError, UnsupportedError

KEPT = 4096
"""Calls whose digests a rank remembers: more than ranks can be apart."""

_MASK = (1 << 63) - 1
_ODD = 0x5851F42D4C957F2D


@dataclass(frozen=True, slots=True)
class Kind:
    """What a call runs: `digest` (63 bits) tells kinds apart, `text` describes one for people."""

    digest: int
    text: str

    @classmethod
    def of(cls, text: str, *facts: str) -> Kind:
        """The kind with that text; `facts` count in the digest, too."""
        digest = hashlib.sha256("\n".join((text, *facts)).encode()).digest()
        return cls(int.from_bytes(digest[:8], "big") & _MASK, text)


PREPARE = Kind.of("prepares an attention that it has not run before")
BACKWARD_ENDS = Kind.of("has come to the end of the backward")


class Call(NamedTuple):
    """A call: its number from 1 on, what it runs, and the sum of all digests up to it."""

    number: int
    digest: int
    chain: int


class _Layer(threading.local):
    number = 0


_LAYER = _Layer()


def at_layer(number: int) -> AbstractContextManager[None]:
    """Attentions called inside belong to that layer of a model, so that ranks tell equal layers apart.

    number: from 1 on. Under torch.compile layers are not told apart.
    """
    return nullcontext() if torch.compiler.is_compiling() else _at_layer(number)


@contextmanager
def _at_layer(number: int) -> Iterator[None]:
    before, _LAYER.number = _LAYER.number, number
    try:
        yield
    finally:
        _LAYER.number = before


def current_layer() -> int:
    """The layer that calls belong to now; 0 where nobody has said."""
    return _LAYER.number


class Calls:
    """What this rank has run over a group, what it does now, and the error that lost the group.

    last: the call that began last. doing: what the rank is inside of, "" outside of attention. where: the step that
    runs and the ranks that it waits for, if a transport can tell. pending: whether the device still works on a call
    that the host has issued.
    """

    def __init__(self) -> None:
        self.last = Call(0, 0, 0)
        self.doing = ""
        self.lost: DistAttentionError | None = None
        self.told = False
        self.where: Callable[[], tuple[int, tuple[int, ...]]] | None = None
        self.pending: Callable[[], bool] = _never
        self.issued: Callable[[], None] = _nothing
        self._log = [self.last] * KEPT
        self._texts: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    def add(self, kind: Kind, layer: int = 0) -> Call:
        """Count a call of that kind. Where the group is lost, raise what lost it."""
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
        """A call begins; `end` or `fail` follows."""
        self.enter(kind.text)
        try:
            return self.add(kind, layer)
        except BaseException:
            self.doing = ""
            raise

    def end(self) -> None:
        """The call has been issued to its end. Where the group was lost meanwhile, its result is not given out."""
        self.issued()
        self.doing = ""
        if self.lost is not None:
            self.check()

    def fail(self, error: BaseException) -> None:
        """The call has failed: the group is lost, as the other ranks are in the same call."""
        self.lose(error, told=True)
        self.doing = ""

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Around what other ranks take part in and is no call: a wait that a watcher may see."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    def enter(self, doing: str) -> None:
        """This thread is in a call from now on.

        Raises:
            UnsupportedError: another thread is, or the group's calls are another's. The order of calls would be left
                to chance, and ranks would mix them up.
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
        self.doing = doing

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Around the preparation of an attention that the group has not run before; an error there loses nothing."""
        self.enter(PREPARE.text)
        try:
            self.add(PREPARE)
            yield
        finally:
            self.doing = ""

    def on_device(self) -> None:
        """Calls go on after the host has issued them: have `pending` tell until when."""
        done = torch.cuda.Event()

        def issued() -> None:
            if not torch.cuda.is_current_stream_capturing():
                done.record()

        self.issued, self.pending = issued, lambda: not done.query()

    @property
    def thread(self) -> str:
        """The name of the thread whose calls these are."""
        return (self._thread or threading.current_thread()).name

    def lose(self, error: BaseException, *, told: bool) -> None:
        """The group cannot be used any more. told: whoever calls it knows already."""
        if self.lost is None:
            if not isinstance(error, DistAttentionError):
                error = LostGroupError(f"{type(error).__name__}: {error}")
            self.lost, self.told = error, told

    def check(self) -> None:
        """Raise what lost the group: the error itself where nobody has seen it yet."""
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
        """The call of that number, while it is remembered."""
        call = self._log[number % KEPT]
        return call if call.number == number else None

    def recent(self, count: int) -> list[tuple[int, str]]:
        """(number, what it ran) of the last calls."""
        last = self.last.number
        found = (self.at(number) for number in range(max(1, last - count + 1), last + 1))
        return [(call.number, self._texts[call.digest]) for call in found if call is not None]

    def token(self, captured: bool) -> int:
        """A number (32 bits, not 0) of the call that is running, the same on all ranks; 1 outside of calls.

        captured: for a CUDA graph, which is replayed by other calls of the same kind.
        """
        if not self.doing:
            return 1
        return ((self.last.digest if captured else self.last.chain) & 0xFFFFFFFF) or 1


def _never() -> bool:
    return False


def _nothing() -> None:
    """The default of `Calls.issued`."""
