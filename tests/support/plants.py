"""Faults that tests plant; each breaks one thing as a real mistake would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch


@contextmanager
def attention_with(home: Any, **changed: Any) -> Iterator[None]:
    """Call both functions of the module `home` with other arguments."""
    names = ("dist_flash_attn_func", "dist_flash_attn_varlen_func")
    real = {name: getattr(home, name) for name in names}

    def other(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: real[name](*args, **{**kwargs, **changed})

    with patch.multiple(home, **{name: other(name) for name in names}):
        yield


@contextmanager
def documents_lost(home: Any) -> Iterator[None]:
    """Take a pack for one sequence in the module `home`."""
    whole = home.dist_flash_attn_func

    def one(q: Any, k: Any, v: Any, offsets: Any, **kwargs: Any) -> Any:
        if q.dim() == 4:  # rows of a batch
            return whole(q, k, v, **kwargs)
        return whole(q[None], k[None], v[None], **kwargs)[0]

    with patch.object(home, "dist_flash_attn_varlen_func", one):
        yield


def a_kernel_ignores_the_window() -> None:
    from dfa_megatron.kernels.adapters.cpu import CpuKernel

    for name in ("forward", "backward"):
        setattr(CpuKernel, name, _without_left_bound(getattr(CpuKernel, name)))


def _without_left_bound(real: Any) -> Any:
    def wrong(self: Any, call: Any, *results: Any) -> Any:
        whole = call.segments
        parts = tuple(replace(s, band=replace(s.band, left=-1)) for s in whole.parts)
        return real(self, replace(call, segments=type(whole)(parts, whole.q_len, whole.kv_len)), *results)

    return wrong


def the_backward_has_stale_keys() -> None:
    """It computes with the keys of the first call of that shape."""
    from dfa_megatron.kernels.adapters.cpu import CpuKernel

    real, first = CpuKernel.backward, {}  # type: ignore[var-annotated]

    def wrong(self: Any, call: Any, *results: Any) -> Any:
        return real(self, replace(call, k=first.setdefault(call.k.shape, call.k.clone())), *results)

    setattr(CpuKernel, "backward", wrong)  # noqa: B010


@contextmanager
def states_dropped() -> Iterator[None]:
    """Let the recurrences of every rank start from zero."""
    from dfa_megatron.recurrence import passing

    def zeros(carries: Any, source: Any, wanted: Any, matrix: bool) -> Any:
        return {piece: 0 * next(iter(carries.values()))[1] for piece in wanted}

    with patch.object(passing, "fold", zeros):
        yield
