"""What the ranks of a group compare: the facts of each new attention, and the number and digest of every call.

Every rank must run the same calls in the same order. `chain` combines the digests of all calls so far. Two ranks that
once ran different calls have different chains from then on, so comparing the chain of any later call is enough.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dfa_megatron.errors import DisagreementError, DistAttentionError, LostGroupError, UnsupportedError
from dfa_megatron.kernels.current_stream import current_stream
from dfa_megatron.runtime.agreement.store import listed, nothing

KEPT, _SHOWN = 4096, 64
"""Calls that a rank remembers, more than ranks can be apart, and that ranks show each other once they differ."""
_MASK, _ODD = (1 << 63) - 1, 0x5851F42D4C957F2D
_TOKENS = "as many tokens, or layout=layouts.of_lengths([...]),"

Facts = dict[str, str]
"""What ranks compare, by name."""


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


class CountedCall(NamedTuple):
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
        doing: text of the running call, "" outside.
        lost: the error that lost the group, if one did. told: whether the caller has seen it.
        where: returns the step that runs and the ranks that it waits for, if a transport can tell.
        when_lost: called once, when the group is lost.
    """

    def __init__(self) -> None:
        self.last, self.doing, self.told = CountedCall(0, 0, 0), "", False
        self.lost: DistAttentionError | None = None
        self.where: Callable[[], tuple[int, tuple[int, ...]]] | None = None
        self.when_lost: Callable[[], object] = nothing
        self._log, self._texts, self._refused = [self.last] * KEPT, dict[int, str](), (0, "")
        self._done: dict[torch.device, torch.cuda.Event] = {}
        self._thread: threading.Thread | None = None

    def add(self, kind: Kind, layer: int = 0) -> CountedCall:
        """Count a call of that kind. Raises the error that lost the group, if one did."""
        if self.lost is not None:
            self.check()
        digest = kind.digest ^ (layer * _ODD & _MASK)
        if digest not in self._texts:
            self._texts[digest] = kind.text + (f", layer {layer}" if layer else "")
        last = self.last
        call = CountedCall(last.number + 1, digest, ((last.chain ^ digest) * _ODD + 1) & _MASK)
        self._log[call.number % KEPT] = call
        self.last = call
        return call

    def begin(self, kind: Kind, layer: int = 0) -> None:
        """Begin a call; `end` or `fail` follows.

        Refuse it where another thread is inside of a call, which loses the group, or has made the calls so far.
        """
        me = threading.current_thread()
        owner, autograd = self._thread, isinstance(me, threading._DummyThread)
        if owner is None or (owner is not me and not autograd and not owner.is_alive() and not self.doing):
            self._thread = owner = me
        stray = owner is not me and not autograd
        if self.doing or stray:
            what = f"attention over one group from two threads, {owner.name!r} and {me.name!r}"
            instead = "one thread for all calls of a group, or a group for each thread"
            error = UnsupportedError(what, "the ranks would run their calls in different orders", instead)
            if not stray:  # of which nothing was sent, on any rank
                self.lose(error, told=False)
            raise error
        self.add(kind, layer)
        self.doing = kind.text

    def end(self) -> None:
        """End a call that has been issued. If the group was lost meanwhile, raise its error."""
        for device, done in self._done.items():
            if not torch.cuda.is_current_stream_capturing():
                done.record(current_stream(device))
        self.doing = ""
        if self.lost is not None:
            self.check()

    def fail(self, error: BaseException) -> None:
        """Mark the group as lost: the other ranks are still inside of the call that failed here."""
        self.lose(error, told=True)
        self.doing = ""

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Show the watch a wait for other ranks that is not a call."""
        before, self.doing = self.doing, doing
        try:
            yield
        finally:
            self.doing = before

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the preparation of a new attention as a call; an error in it does not lose the group."""
        self.begin(PREPARE)
        try:
            yield
        finally:
            self.doing = ""

    def refuse(self, why: str) -> None:
        """Show other ranks why this one refuses in the call that runs, if their calls differ."""
        self._refused = self.last.number, f"refuses: {why}"

    @property
    def refused(self) -> bool:
        """Whether the last call was to tell the others of an error."""
        return self.last.number == self._refused[0]

    def on_device(self, device: torch.device) -> None:
        """Let `pending` follow a GPU too, which works on after the host has issued a call."""
        if device.type == "cuda" and device not in self._done:
            self._done[device] = torch.cuda.Event()

    def pending(self) -> bool:
        """Return whether a device still works on a call that the host has issued."""
        return not all(done.query() for done in list(self._done.values()))

    @property
    def thread(self) -> str:
        """The name of the thread that makes the calls, without the number that each process counts for itself."""
        name = (self._thread or threading.current_thread()).name
        return re.sub(r"^(Thread|Dummy|ThreadPoolExecutor)-\d+", r"\1", name)

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

    def at(self, number: int) -> CountedCall | None:
        """Return the call of that number, or None if it is forgotten."""
        call = self._log[number % KEPT]
        return call if call.number == number else None

    def shown(self) -> str:
        """Return (number, text, digest) of the last calls, as JSON."""
        found = (self.at(number) for number in range(max(1, self.last.number - _SHOWN + 1), self.last.number + 1))
        at, why = self._refused
        texts = [(x.number, why if x.number == at else self._texts[x.digest], x.digest) for x in found if x is not None]
        return json.dumps(texts)

    def token(self, captured: bool) -> int:
        """Return a token (32 bits, not 0) of the running call, equal on all ranks; 1 outside of calls.

        captured: for a CUDA graph of the caller, whose replays are calls of the same kind.
        """
        number = self.last.digest if captured else self.last.chain
        return (number & 0xFFFFFFFF or 1) if self.doing else 1


def different(everyone: Sequence[Facts]) -> DisagreementError:
    """Return the error of facts that differ, by rank, with a table of them; or of a rank that sends an error."""
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            return DisagreementError(f"rank {rank} of the group refuses this attention: {theirs['error']}")
    fields = sorted({field for theirs in everyone for field in theirs}, key=lambda field: (field == "plan", field))
    told = {field: [theirs.get(field, "(nothing)") for theirs in everyone] for field in fields}
    told = {field: values for field, values in told.items() if len({*values}) > 1}
    lines = [f"  {field}: {by_rank(values)}" for field, values in told.items()]
    lines.append(f"What works: {_TOKENS if 'tokens of a rank' in told else 'the same'} on every rank.")
    return DisagreementError("\n".join(("the ranks of the group ask for different attentions:", *lines)))


def by_rank(values: Sequence[str]) -> str:
    """Return one line with each value and the ranks that have it; `values` are by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on rank{'s' * (len(those) > 1)} {listed(those)}" for value, those in ranks.items())


def first_difference(everyone: Sequence[str | None]) -> str:
    """Say at which call ranks first differ, and what each ran.

    everyone: `Calls.shown` of each rank; None of one that does not answer.
    """
    shown = [{n: (text, digest) for n, text, digest in json.loads(calls or "[]")} for calls in everyone]
    there = [calls for calls in shown if calls]
    head, tail = "the ranks of the group run different attentions", "Every rank must call attention in the same order"
    first = max((min(calls) for calls in there), default=1)
    for number in range(first, max((max(calls) for calls in there), default=0) + 1):
        if len({calls.get(number, ("", 0))[1] for calls in there}) > 1:  # no words: an error that all have heard
            ran = [calls.get(number, ("has not come so far" if calls else "does not answer", 0)) for calls in shown]
            texts = [text for text, _ in ran]
            if len(set(texts)) < len(set(ran)):  # they differ in what takes no words: a mask's tiles
                texts = [f"{text} (digest {digest:016x})" if digest else text for text, digest in ran]
            return f"{head}, after {number - 1} equal calls:\n  call {number}: {by_rank(texts)}\n{tail}"
    last = [f"{calls[max(calls)][0]} (call {max(calls)})" if calls else "does not answer" for calls in shown]
    return f"{head}. Those that are known do not say in which call. The last ones:\n  {by_rank(last)}\n{tail}"
