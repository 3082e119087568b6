"""DeepSpeed's pipelines: sequences lie across the ranks of a stage, which are DeepSpeed's data-parallel ranks.

A pipeline's loss and batch arithmetic know of stages and data-parallel ranks alone. So a sequence takes `size` of the
data-parallel ranks of each stage, gradients are averaged over all of them, and the rule for the loss is the usual one.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dfa_megatron import remat
from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from dfa_megatron.deepspeed.mesh import Mesh, make_mesh
from dfa_megatron.deepspeed.refusals import CALL


def is_pipeline(model: Any) -> bool:
    """Whether DeepSpeed would make a pipeline engine for this model."""
    from deepspeed.pipe import PipelineModule

    return isinstance(model, PipelineModule)


def pipeline_mesh(module: Any, size: int | None) -> Mesh:
    """The mesh of this rank's stage.

    Raises:
        UnsupportedError: the topology has other axes or another order of ranks.
    """
    topology = module.topology()
    axes = topology.get_axis_names()
    CALL.check(axes=None if axes == ["pipe", "data"] else ", ".join(axes))
    return make_mesh(size, stages=topology.get_dim("pipe"))


def settings_for(settings: dict[str, Any], module: Any, block: DeepSpeedOptions) -> dict[str, Any]:
    """DeepSpeed's settings for a pipeline: every layer is checkpointed, if no interval was given.

    Without a word on `use_reentrant` it is false: a re-entrant checkpoint of a first layer that takes token numbers has
    no input with a gradient, and DeepSpeed's backward would fail there.

    Raises:
        UnsupportedError: activation_checkpointing.cpu_checkpointing.
    """
    settings = {key: value for key, value in settings.items() if key != "sequence_parallel_size"}
    CALL.check(pipeline_on_host=(settings.get("activation_checkpointing") or {}).get("cpu_checkpointing"))
    if block.options.checkpoint != "none":
        given = settings.get("pipeline") or {}
        interval = given.get("activation_checkpoint_interval") or module.activation_checkpoint_interval or 1
        settings["pipeline"] = {"use_reentrant": False, **given, "activation_checkpoint_interval": interval}
    return settings


def set_remat(engine: Any, *, offload: bool) -> None:
    """Have the pipeline's checkpoints keep attention's output and lse, in host memory with offload."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    module = engine.module
    own = module.activation_checkpoint_func
    if own is checkpointing.non_reentrant_checkpoint:
        module.activation_checkpoint_func = functools.partial(
            torch_checkpoint, use_reentrant=False, context_fn=functools.partial(remat.context_fn, offload=offload)
        )
    else:
        module.activation_checkpoint_func = functools.partial(remat.remat_checkpoint, checkpoint=own, offload=offload)
