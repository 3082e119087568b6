"""What PyTorch may not do with this package's functions: trace them, differentiate them twice, round their products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

from dfa_megatron.errors import UnsupportedError

without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast  # type: ignore[attr-defined,unused-ignore]
"""A context in which no operation is cast. It costs no call of Python."""

without_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""A context in which no function mode sees a call, such as that of a default device."""

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Have a compiler call a function as it stands, with one break of the graph.

    PyTorch's own decorator loads Dynamo with the first call: seconds, and modules that keep the default group alive.
    """
    uncompiled = _disable_dynamo(function)

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return (uncompiled if torch.compiler.is_compiling() else function)(*args, **options)

    return called  # type: ignore[return-value]


Backward = Callable[..., Any]


def differentiable_once(what: str, *varies: int) -> Callable[[Backward], Backward]:
    """Return a decorator for the backward of an autograd function, which runs without gradients and autocast.

    Under create_graph its results may be read, and are refused where a derivative of theirs would be lost, as
    PyTorch's own flash attention does. what: its name. varies: the inputs by their numbers on which the gradients
    depend. None: they are linear in the one that comes.
    """
    refused = UnsupportedError(
        f"a second derivative of {what}",
        "its backward cannot be differentiated, so a gradient penalty would be dropped",
        "first derivatives, which may be read under create_graph=True",
    )

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            with torch.no_grad(), without_autocast(), without_functions():
                found = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return found
            given = any(x is not None and x.requires_grad for x in gradients)
            return _refusing(found, str(refused)) if given or any(ctx.needs_input_grad[n] for n in varies) else found

        return once

    return decorate


def _refusing(found: Any, why: str) -> tuple[torch.Tensor | None, ...]:
    """Return the same gradients; a derivative of them raises."""
    found = found if isinstance(found, tuple) else (found,)
    tensors = [x.detach().requires_grad_() for x in found if x is not None]
    refuse: Any = torch._C._functions.DelayedError(why.encode(), len(tensors))  # type: ignore[attr-defined,unused-ignore]
    marked = refuse(*tensors)
    left = iter(marked if isinstance(marked, tuple | list) else (marked,))
    return tuple(None if x is None else next(left) for x in found)
