"""Recordings: what functions do to tensors, recorded once for each layout of them, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from dfa_megatron.kernels.leaf import without_autocast, without_functions
from dfa_megatron.kernels.replay import Op, OpFailed, Registers, allocating_late, freeing, replay
from dfa_megatron.kernels.tape import Tape, signature, unrecorded

Fields = tuple[torch.Tensor, ...]

Act = Callable[..., None]
"""Call a function (owner, *tensors) that is no tensor operation, on these tensors; it returns nothing."""

Function = Callable[..., Fields]
"""(owner, act, *tensors) -> tensors: it does nothing but operations on the tensors, and calls of `act`."""

_MOST = 16
"""Recorded runs that are kept."""


def recordable(device: torch.device) -> bool:
    """Return whether nothing else listens to the operations, and launches go to the tensors' device."""
    if _get_current_dispatch_mode() is not None:
        return False
    return device.type != "cuda" or (
        torch.cuda.current_device() == device.index and not torch.cuda.is_current_stream_capturing()
    )


class Recordings:
    """The recorded runs of an owner's functions."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], _Recording | str] = {}

    def run(self, function: Function, owner: object, tensors: Fields) -> Fields:
        """Run a function on tensors, whose shapes and dtypes follow from the function and their number."""
        key = function, len(tensors), signature(tensors)
        with without_autocast(), without_functions():
            found = self._known.get(key)
            listens = _get_current_dispatch_mode() is not None
            if isinstance(found, _Recording) and not listens:
                return found.replay(owner, tensors)
            if found is not None or len(self._known) == _MOST or not recordable(tensors[0].device):
                return function(owner, lambda action, *given: action(owner, *given), *tensors)
            results, self._known[key] = _record(function, owner, tensors)
        return results


@dataclass(frozen=True, slots=True)
class _Recording:
    """A run as a list of operations, and the registers of the owner and the results."""

    ops: list[Op]
    registers: Registers
    owner: int
    results: tuple[int, ...]

    def replay(self, owner: object, tensors: Fields) -> Fields:
        registers = self.registers.copy()
        registers[: len(tensors)], registers[self.owner] = tensors, owner
        try:
            replay(self.ops, registers)
        except OpFailed as failed:
            raise failed.error from None
        return tuple(map(registers.__getitem__, self.results))


def _record(function: Function, owner: object, tensors: Fields) -> tuple[Fields, _Recording | str]:
    """Run a function; return its results and the recorded run, or why it cannot be replayed."""
    given = tuple(x.detach() for x in tensors)  # the tape tells tensors apart as objects
    with Tape(given) as tape:
        register = tape.reserve()

        def act(action: Callable[..., object], *reads: torch.Tensor) -> None:
            with unrecorded():
                action(owner, *reads)
            tape.act(action, (register, *map(tape.register, reads)))

        results = function(owner, act, *given)
    found = tuple(map(tape.register, results))
    ops = freeing(allocating_late(tape.ops), set(), kept=frozenset(found))
    return results, tape.why_not or _Recording(ops, tape.registers(), register, found)
