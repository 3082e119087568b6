"""The launches of FlashAttention-4, handed to a tape: its functions keep what they compiled in caches of their own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dfa_megatron.kernels.tape import launched, recording

_LAUNCHING = (
    "_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert",
    "_compute_tile_cumsum", "_compute_blocks_to_batch",
)  # fmt: skip
"""The package's functions that launch, each with a `compile_cache`: all that a call of ours reaches in READ."""


class _Handing:
    """A cache of compiled functions that hands each launch to the tape."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __contains__(self, key: object) -> bool:
        return key in self.cache

    def __setitem__(self, key: object, function: Callable[..., object]) -> None:
        self.cache[key] = function

    def __getitem__(self, key: object) -> Callable[..., object]:
        return functools.partial(launched, self.cache[key])


@contextmanager
def launches_seen() -> Iterator[None]:
    """Hand the package's launches inside to the tape that records here, if one does."""
    if recording() is None:
        yield
        return
    interface = importlib.import_module("flash_attn.cute.interface")
    launching = [getattr(interface, name) for name in _LAUNCHING]
    caches = [function.compile_cache for function in launching]
    for function, cache in zip(launching, caches, strict=True):
        function.compile_cache = _Handing(cache)
    try:
        yield
    finally:
        for function, cache in zip(launching, caches, strict=True):
            function.compile_cache = cache
