"""Honour the JSON's block in code that calls `deepspeed.initialize`, which is the one name that is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dfa_megatron.hooks import OWN, put_back, replace


def install() -> None:
    """Replace `deepspeed.initialize` by `dfa_megatron.deepspeed.initialize`; may be called again.

    Code that calls `deepspeed.initialize(...)` gets ours. Code that imported the name before keeps DeepSpeed's. For HF
    Trainer and accelerate there are `distribute_trainer` and `distribute_accelerator` of dfa_megatron.huggingface.
    """
    import deepspeed

    from dfa_megatron.deepspeed.initialize import initialize

    replace(deepspeed, "initialize", lambda _: lambda *args, **kwargs: initialize(*args, **kwargs))


def uninstall() -> None:
    """Put DeepSpeed's own back; may be called again."""
    import deepspeed

    put_back(deepspeed, "initialize")


@contextmanager
def installed() -> Iterator[None]:
    """Replace the name for a while."""
    import deepspeed

    before = deepspeed.initialize
    install()
    try:
        yield
    finally:
        if deepspeed.initialize is not before:
            uninstall()


def deepspeeds_own() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return DeepSpeed's own `initialize`, whether or not ours replaces it."""
    import deepspeed

    own: Callable[..., tuple[Any, Any, Any, Any]] = getattr(deepspeed.initialize, OWN, deepspeed.initialize)
    return own
