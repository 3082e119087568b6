"""Lets scripts that call `deepspeed.initialize` have the JSON's block honoured, and takes that back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_dfa_original"
"""The attribute of our function in DeepSpeed's place that holds DeepSpeed's own."""


def install() -> None:
    """Put `dfa_megatron.deepspeed.initialize` in the place of `deepspeed.initialize`; may be called again.

    It reaches code that looks the function up when it calls it, `deepspeed.initialize(...)`, and not a name that was
    imported before.
    """
    import deepspeed

    from dfa_megatron.deepspeed.initialize import initialize

    own = deepspeeds_own()

    @functools.wraps(own)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs)

    setattr(instead, _MARK, own)
    deepspeed.initialize = instead


def uninstall() -> None:
    """Put DeepSpeed's own function back, if it is not in its place."""
    import deepspeed

    deepspeed.initialize = deepspeeds_own()


def deepspeeds_own() -> Callable[..., Any]:
    """DeepSpeed's own `initialize`, whether or not ours is in its place."""
    import deepspeed

    own: Callable[..., Any] = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)
    return own
