"""Honour the JSON's block in code that calls `deepspeed.initialize`, including accelerate and HF Trainer.

Two names are replaced, and put back by `uninstall`: `deepspeed.initialize`, and the function by which accelerate asks
DeepSpeed for its Ulysses attention (`ParallelismConfig(sp_size=..., sp_backend="deepspeed")`).

accelerate and HF Trainer take the groups of a sequence from `deepspeed.utils.groups`, which asks an "mpu". An engine
that is made with such an mpu scales gradients by ZeRO stage, so ours is in place only while no engine is being made.
It answers every other question as DeepSpeed does without an mpu.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from dfa_megatron.deepspeed.mesh import Mesh, make_mesh
from dfa_megatron.deepspeed.refusals import check_sizes

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
    """Return DeepSpeed's own `initialize`, whether or not ours replaces it."""
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
        block = DeepSpeedOptions.enabled_in(settings)
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
    """Return DeepSpeed's configuration from accelerate; empty if accelerate is not in use."""
    if importlib.util.find_spec("accelerate") is None:
        return {}
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None) if AcceleratorState._shared_state else None
    return {} if plugin is None else plugin.deepspeed_config


class SequenceGroups:
    """An mpu in DeepSpeed's sense, of a mesh; for accelerate, which hands it on to `initialize`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequence."""
        return self.mesh.group

    def get_sequence_parallel_world_size(self) -> int:
        """Their number."""
        return self.mesh.size

    def get_sequence_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.sequence_rank

    def get_data_parallel_group(self) -> Any:
        """All ranks: gradients are averaged over them."""
        from deepspeed.utils import groups

        return groups._clone_world_group()

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    def get_data_parallel_group_ranks(self) -> range:
        """Their ranks."""
        return range(dist.get_world_size())

    def get_model_parallel_world_size(self) -> int:
        """One: a model is not cut."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """The only one."""
        return 0


def publish(view: SequenceGroups | None) -> None:
    """Answer with this view from now on, or with none of ours."""
    from deepspeed.utils import groups

    if view is not None or isinstance(getattr(groups, "mpu", None), SequenceGroups):
        groups.mpu = view


@contextmanager
def unpublished() -> Iterator[None]:
    """Within it DeepSpeed sees no view of ours, so that an engine made in it knows nothing of sequences."""
    from deepspeed.utils import groups

    before = getattr(groups, "mpu", None)
    ours = isinstance(before, SequenceGroups)
    if ours:
        groups.mpu = None
    try:
        yield
    finally:
        if ours and groups.mpu is None:
            groups.mpu = before
