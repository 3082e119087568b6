"""An exchange of another kind than attention's, which the ranks compare as they compare an attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dfa_megatron.runtime.agreement.calls import Facts, Kind, current_layer
from dfa_megatron.runtime.comm.channel import Channel, refuse
from dfa_megatron.runtime.comm.groups import Group, channel_of
from dfa_megatron.runtime.request import check_config

F = TypeVar("F", bound=Callable[..., Any])

_KEPT = 64
"""Kinds that a group keeps; all ranks drop the same one, because all agree on a new one."""


@dataclass(frozen=True, slots=True)
class Compared:
    """An exchange that all ranks make. over: None for one rank.

    phases: how its forward and its backward are compared; () where nothing is. layer: to which it belongs.
    """

    over: Channel | None = None
    phases: tuple[Kind, ...] = ()
    layer: int = 0

    def running(self, phase: int, device: torch.device, nbytes: int = 0) -> AbstractContextManager[None]:
        """Compare what runs inside: the forward (0) or the backward (1). Raises a DisagreementError.

        nbytes: that this rank sends; those of some exchanges are counted.
        """
        if self.over is None or not self.phases:
            return nullcontext()
        return self.over.running(self.phases[phase], device, ends=phase == 1, layer=self.layer)


def facts_of_tokens(x: torch.Tensor, dim: int) -> Facts:
    """Return what ranks compare of a tensor with tokens along `dim`, of which they may hold different numbers."""
    return {
        "shape": str((*x.shape[:dim], *x.shape[dim % x.dim() + 1 :])),
        "dim": str(dim % x.dim()),
        "dtype": str(x.dtype),
        "gradient": str(torch.is_grad_enabled() and x.requires_grad),
    }


def compared(what: str, over: Channel | None, facts: Facts, device: torch.device, *varying: str) -> Compared:
    """Return the exchange of that description; ranks compare its facts when they are new. Collective.

    facts: by name; those of a layer that stay the same from batch to batch. varying: what changes with a batch, such as
    documents: compared at each call by its digest, so that a new pack costs no round of its own.
    """
    if over is None or not over.verified:
        return Compared(over)
    facts = {"exchange": what, **facts, "device": over.place(device)}
    key, known = tuple(facts.items()), over.agreed
    if key not in known:
        with over.calls.preparing():
            over.agree(facts | {"thread": over.calls.thread})
        over.communicator(device)
        known[key] = None
        if len(known) > _KEPT:
            known.popitem(last=False)
    known.move_to_end(key)
    return described(over, facts, *varying)


def described(over: Channel, facts: Facts, *varying: str) -> Compared:
    """Return the exchange of facts on which the ranks have agreed; "exchange" says what it is."""
    if not over.verified:
        return Compared(over)
    text = ", ".join((*(value if name == "exchange" else f"{name} {value}" for name, value in facts.items()), *varying))
    return Compared(over, (Kind.of(f"forward of {text}"), Kind.of(f"backward of {text}")), current_layer())


@contextmanager
def telling(group: Group, config: Any = ...) -> Iterator[Channel | None]:
    """Give the channel of a group, None of one rank; tell the other ranks of an error, which would wait.

    config: the caller's, which says whether calls are compared; without one that stays as it is.
    """
    over = channel_of(group, verify=None if config is ... else getattr(config, "verify", "on") == "on")
    since = 0 if over is None else over.calls.last.number
    try:
        if config is not ...:
            check_config(config)
        yield over
    except Exception as error:
        refuse(error, over, since)
        raise


def together(function: F) -> F:
    """Have a function that all ranks call tell the others of an error of this one, which would wait."""

    @functools.wraps(function)
    def tells(*args: Any, **options: Any) -> Any:
        with telling(options.get("group"), options.get("config", ...)):
            return function(*args, **options)

    return tells  # type: ignore[return-value]
