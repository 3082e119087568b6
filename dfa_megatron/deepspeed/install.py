"""Lets code that calls `deepspeed.initialize`, accelerate and HF Trainer among it, have the JSON's block honoured.

Two names are replaced, and put back by `uninstall`: `deepspeed.initialize`, and the function by which accelerate asks
DeepSpeed for its Ulysses attention (`ParallelismConfig(sp_size=..., sp_backend="deepspeed")`).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dfa_megatron.deepspeed.json_block import Block
from dfa_megatron.deepspeed.mesh import make_mesh
from dfa_megatron.deepspeed.refusals import check_sizes
from dfa_megatron.deepspeed.sequence_groups import SequenceGroups, publish

_MARK = "_dfa_original"
"""The attribute of our function in DeepSpeed's place that holds DeepSpeed's own."""

_ULYSSES = "register_with_transformers"


def install() -> None:
    """Put `dfa_megatron.deepspeed.initialize` in the place of `deepspeed.initialize`; may be called again.

    It reaches code that looks the function up when it calls it, `deepspeed.initialize(...)`, and not a name that was
    imported before. accelerate and HF Trainer do look it up: with the block in the JSON and
    `ParallelismConfig(sp_size=P, sp_backend="deepspeed")` they train with distributed attention in place of Ulysses.
    """
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from dfa_megatron.deepspeed.initialize import initialize

    own = deepspeeds_own()

    @functools.wraps(own)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs)

    setattr(instead, _MARK, own)
    deepspeed.initialize = instead

    setattr(UlyssesSPAttentionHF, _ULYSSES, _in_place_of(_own_ulysses()))


def uninstall() -> None:
    """Put DeepSpeed's own functions back, if they are not in their places."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.initialize = deepspeeds_own()
    setattr(UlyssesSPAttentionHF, _ULYSSES, _own_ulysses())
    publish(None)


def deepspeeds_own() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """DeepSpeed's own `initialize`, whether or not ours is in its place."""
    import deepspeed

    own: Callable[..., tuple[Any, Any, Any, Any]] = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)
    return own


def _own_ulysses() -> Any:
    """DeepSpeed's own class method, likewise."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    present = UlyssesSPAttentionHF.__dict__[_ULYSSES]
    return getattr(present, _MARK, present)


def _in_place_of(ulysses: Any) -> Any:
    """The class method that accelerate calls: groups for our attention if the JSON's block is enabled, else Ulysses."""

    @functools.wraps(ulysses.__func__)  # accelerate looks at its signature
    def register(cls: type, model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        import deepspeed

        settings = _accelerates_settings()
        block = Block.enabled_in(settings)
        if block is None:
            return ulysses.__get__(None, cls)(model_name_or_path, *args, **kwargs)
        given = inspect.signature(ulysses.__func__).bind(cls, model_name_or_path, *args, **kwargs).arguments
        size = given["sequence_parallel_size"]
        check_sizes("ParallelismConfig.sp_size", size, block.size)
        deepspeed.init_distributed()
        return SequenceGroups(make_mesh(size))

    replacement: Any = classmethod(register)
    setattr(replacement, _MARK, ulysses)
    return replacement


def _accelerates_settings() -> Mapping[str, Any]:
    """DeepSpeed's configuration as accelerate holds it; empty where accelerate is not in use."""
    if importlib.util.find_spec("accelerate") is None:
        return {}
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None) if AcceleratorState._shared_state else None
    return {} if plugin is None else plugin.deepspeed_config
