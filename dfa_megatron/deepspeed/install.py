"""Honour the JSON's block in code that calls `deepspeed.initialize`, which is the one name that is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_own: Callable[..., Any] | None = None
"""DeepSpeed's `initialize`, while ours stands in its place."""


def install() -> None:
    """Replace `deepspeed.initialize` by `dfa_megatron.deepspeed.initialize`; may be called again.

    Code that calls `deepspeed.initialize(...)` gets ours. Code that imported the name before keeps DeepSpeed's. For HF
    Trainer and accelerate there are `distribute_trainer` and `distribute_accelerator` of dfa_megatron.huggingface.
    """
    global _own
    import deepspeed

    from dfa_megatron.deepspeed.initialize import initialize

    if _own is not None:
        return
    _own = deepspeed.initialize

    @functools.wraps(deepspeed.initialize)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs)

    deepspeed.initialize = instead


def uninstall() -> None:
    """Put DeepSpeed's own back; may be called again."""
    global _own
    import deepspeed

    if _own is not None:
        deepspeed.initialize, _own = _own, None


@contextmanager
def installed() -> Iterator[None]:
    """Replace the name for a while."""
    before = _own
    install()
    try:
        yield
    finally:
        if before is None:
            uninstall()


def deepspeeds_own() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return DeepSpeed's own `initialize`, whether or not ours replaces it."""
    import deepspeed

    own: Callable[..., tuple[Any, Any, Any, Any]] = deepspeed.initialize if _own is None else _own
    return own
