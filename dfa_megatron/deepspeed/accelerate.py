"""Honour the JSON's block in code that calls `deepspeed.initialize`, including accelerate and HF Trainer.

Replaced are `deepspeed.initialize`, the function by which accelerate asks DeepSpeed for its Ulysses attention
(`ParallelismConfig(sp_size=..., sp_backend="deepspeed")`), and three names by which accelerate counts processes.
`uninstall` puts all back.

accelerate and HF Trainer take the groups of a sequence from `deepspeed.utils.groups`, which asks an "mpu". DeepSpeed
scales the gradients of an engine made with such an mpu by ZeRO stage. So ours is in place only while no engine is made.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from dfa_megatron.deepspeed.mesh import Mesh, make_mesh
from dfa_megatron.deepspeed.tested_keys import check_sizes
from dfa_megatron.errors import UnsupportedError

_owns: dict[tuple[Any, str], Any] = {}
"""What stood where `install` put ours, by its owner and name; None for nothing."""

_ULYSSES = "register_with_transformers"

_BY_RANKS: ContextVar[bool] = ContextVar("a loader is being prepared", default=False)


def install() -> None:
    """Replace `deepspeed.initialize` by `dfa_megatron.deepspeed.initialize`; may be called again.

    Code that calls `deepspeed.initialize(...)` gets ours. Code that imported the name before keeps DeepSpeed's.
    accelerate and HF Trainer get ours. With the block in the JSON and
    `ParallelismConfig(sp_size=P, sp_backend="deepspeed")` they train with distributed attention in place of Ulysses.
    """
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from dfa_megatron.deepspeed.initialize import initialize

    if _owns:
        return

    @functools.wraps(deepspeed.initialize)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return initialize(*args, **kwargs)

    ours = [
        (deepspeed, "initialize", instead),
        (UlyssesSPAttentionHF, _ULYSSES, _in_place_of(vars(UlyssesSPAttentionHF)[_ULYSSES])),
    ]
    if importlib.util.find_spec("accelerate") is not None:
        ours += _counting_groups()
    for owner, name, value in ours:
        _owns[owner, name] = vars(owner).get(name)
        setattr(owner, name, value)


def uninstall() -> None:
    """Put DeepSpeed's and accelerate's own back; may be called again."""
    for (owner, name), own in _owns.items():
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    _owns.clear()
    publish(None)


def deepspeeds_own() -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return DeepSpeed's own `initialize`, whether or not ours replaces it."""
    import deepspeed

    own: Callable[..., tuple[Any, Any, Any, Any]] = _owns.get((deepspeed, "initialize"), deepspeed.initialize)
    return own


def _in_place_of(ulysses: Any) -> Any:
    """Return the class method for accelerate: our groups if the JSON's block is enabled, else DeepSpeed's Ulysses."""

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
        mesh = make_mesh(size)
        over_gloo = "gloo" in str(dist.get_backend()) and size > 1 and mesh.data_size > 1
        if over_gloo and _by_trainer():
            raise UnsupportedError(
                f"HF Trainer with {mesh.data_size} sequences at a time over gloo",
                "in the backward of its loss PyTorch looks for the first ranks of all in every group",
                "nccl; sp_size of all ranks; or a loop of your own around accelerate, with dfa_megatron.deepspeed.loss",
            )
        return SequenceGroups(mesh)

    return classmethod(register)


def _counting_groups() -> list[tuple[Any, str, Any]]:
    """Return what makes accelerate count groups of ranks as its processes: the class, the name, and the new value.

    It steps prepared schedulers once for each process, and scripts multiply the length of schedules by `num_processes`.
    Its loaders still give every rank batches of its own, of which DeepSpeed's adapter makes the parts.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    own = Accelerator.prepare_data_loader

    def processes(state: Any) -> int:
        if "num_processes" not in vars(state):
            raise AttributeError("num_processes")  # accelerate says why
        ranks: int = vars(state)["num_processes"]
        return ranks if _BY_RANKS.get() or ranks == 1 else ranks // _shared_by(state)  # on CPUs it may know one only

    def is_last(accelerator: Any) -> bool:
        last: bool = accelerator.state.is_last_process
        return last

    @functools.wraps(own)
    def prepare_data_loader(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        size = _shared_by(accelerator.state)
        if size > 1 and accelerator.split_batches:
            raise UnsupportedError(
                f"split_batches with ParallelismConfig(sp_size={size})",
                "a step would take the sequences of a batch divided by sp_size, and schedules would end too early",
                "split_batches=False",
            )
        token = _BY_RANKS.set(True)
        try:
            return own(accelerator, *args, **kwargs)
        finally:
            _BY_RANKS.reset(token)

    return [
        (AcceleratorState, "num_processes", property(processes)),
        (Accelerator, "is_last_process", property(is_last)),
        (Accelerator, "prepare_data_loader", prepare_data_loader),
    ]


def _accelerates_settings() -> Mapping[str, Any]:
    """Return DeepSpeed's configuration from accelerate; empty if accelerate is not in use."""
    if importlib.util.find_spec("accelerate") is None:
        return {}
    from accelerate.state import AcceleratorState

    plugin = getattr(AcceleratorState(), "deepspeed_plugin", None) if AcceleratorState._shared_state else None
    return {} if plugin is None else plugin.deepspeed_config


def _shared_by(state: Any) -> int:
    """Return the ranks that share a sequence by accelerate's configuration and the JSON's block; 1 without either."""
    parallel = vars(state).get("parallelism_config")
    size: int = getattr(parallel, "sp_size", 1)
    if size == 1 or parallel.sp_backend != "deepspeed" or getattr(state, "deepspeed_plugin", None) is None:
        return 1
    return size if DeepSpeedOptions.enabled_in(state.deepspeed_plugin.deepspeed_config) else 1


def _by_trainer() -> bool:
    """Return whether HF Trainer made accelerate's configuration of DeepSpeed."""
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    return isinstance(AcceleratorState().deepspeed_plugin.hf_ds_config, HfTrainerDeepSpeedConfig)


class SequenceGroups:
    """Answer accelerate's and DeepSpeed's questions about the ranks of a mesh; DeepSpeed calls such an object an mpu.

    Gradients are averaged over all ranks, so every rank is data parallel. No model is split.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.get_sequence_parallel_group = lambda: mesh.group
        self.get_sequence_parallel_world_size = lambda: mesh.size
        self.get_sequence_parallel_rank = lambda: mesh.sequence_rank
        self.get_data_parallel_world_size = dist.get_world_size
        self.get_data_parallel_rank = dist.get_rank
        self.get_data_parallel_group_ranks = lambda: range(dist.get_world_size())
        self.get_model_parallel_world_size = lambda: 1
        self.get_model_parallel_rank = lambda: 0

    def get_data_parallel_group(self) -> Any:
        """Return DeepSpeed's group of all ranks."""
        from deepspeed.utils import groups

        return groups._clone_world_group()


def publish(view: SequenceGroups | None) -> None:
    """Let DeepSpeed ask this mpu from now on; None takes ours away."""
    from deepspeed.utils import groups

    if view is not None or isinstance(getattr(groups, "mpu", None), SequenceGroups):
        groups.mpu = view


@contextmanager
def unpublished() -> Iterator[None]:
    """Hide our mpu from DeepSpeed, so that an engine made meanwhile does not scale gradients by it."""
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
