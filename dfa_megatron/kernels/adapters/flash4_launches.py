"""The launches of FlashAttention-4, seen one by one: its functions keep what they compiled in caches of their own.

A tape records them. Large gradients get their memory with the launch that writes them, and give it back if a later
launch has converted them: the package would hold all of it, for as long as its function runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dfa_megatron.kernels.tape import launched, recording

_LAUNCHING = (
    "_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert",
    "_compute_tile_cumsum", "_compute_blocks_to_batch",
)  # fmt: skip
"""The package's functions that launch, each with a `compile_cache`: all that a call of ours reaches in READ."""

_CONVERTS = "_bwd_postprocess_convert"
"""Its launch reads a gradient in float32, the first argument, for the last time."""

_LARGE = 64 << 20
"""Bytes of gradients from which on their memory comes late; below, the host's time counts for more."""


class _SeenCache:
    """A cache of compiled functions that sees each launch."""

    def __init__(self, cache: Any, *, converts: bool) -> None:
        self.cache, self._converts = cache, converts

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __setitem__(self, key: object, function: Callable[..., object]) -> None:
        self.cache[key] = function
        if (tape := recording()) is not None:
            tape.why_not = "flash-attn-4 compiled in this run"

    def __getitem__(self, key: object) -> Callable[..., object]:
        return functools.partial(self._launch, self.cache[key])

    def _launch(self, function: Callable[..., object], *args: Any) -> None:
        for x in args:
            if isinstance(x, torch.Tensor) and not has_memory(x):
                x.untyped_storage().resize_(x.numel() * x.element_size())
        launched(function, *args)
        if self._converts:
            args[0].untyped_storage().resize_(0)


@contextmanager
def launches_seen(*, late: bool = False) -> Iterator[None]:
    """See the package's launches inside, if a tape records here or memory comes late."""
    if recording() is None and not late:
        yield
        return
    interface = importlib.import_module("flash_attn.cute.interface")
    caches = {name: getattr(interface, name).compile_cache for name in _LAUNCHING}
    for name, cache in caches.items():
        getattr(interface, name).compile_cache = _SeenCache(cache, converts=late and name == _CONVERTS)
    try:
        yield
    finally:
        for name, cache in caches.items():
            getattr(interface, name).compile_cache = cache


def late_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return dq, dk and dv without memory, for `launches_seen(late=True)`, or {} where they are small."""
    if sum(x.numel() * x.element_size() for x in (q, k, v)) < _LARGE:
        return {}
    gradients = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for x in gradients.values():
        x.untyped_storage().resize_(0)
    return gradients


def has_memory(x: torch.Tensor) -> bool:
    """Return whether a tensor has its memory by now."""
    return x.numel() == 0 or x.untyped_storage().nbytes() > 0
