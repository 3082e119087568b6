"""Distribute sequences over the ranks of a pipeline stage, which DeepSpeed treats as data parallel.

DeepSpeed computes a pipeline's loss and batch sizes from stages and data-parallel ranks alone. A sequence takes `size`
data-parallel ranks of each stage. Gradients are averaged over all of them, and the rule for the loss does not change.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dfa_megatron.config import TrainingConfig
from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checkpointing import checkpoint_function
from dfa_megatron.huggingface.mesh import Mesh, make_mesh


def pipeline_mesh(module: Any, size: int | None) -> Mesh:
    """Return the mesh of this rank's stage.

    Raises:
        UnsupportedError: the topology has other axes or another order of ranks.
    """
    topology = module.topology()
    axes = ", ".join(topology.get_axis_names())
    if axes != "pipe, data":
        raise UnsupportedError(
            f"a pipeline with the axes {axes}",
            "sequences lie across the data-parallel ranks of a stage, which must be consecutive",
            "PipelineModule(num_stages=...), or a topology with the axes pipe, data",
        )
    return make_mesh(size, stages=topology.get_dim("pipe"))


def check_clipping(module: Any, settings: Mapping[str, Any]) -> None:
    """Refuse what DeepSpeed clips wrong: the stages of a pipeline whose gradients no ZeRO optimizer holds.

    Raises:
        UnsupportedError: several stages at ZeRO 0, and gradient_clipping, which is on by default.
    """
    from deepspeed.runtime.constants import GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT

    sharded = (settings.get("zero_optimization") or {}).get("stage", 0) > 0
    clipping = settings.get(GRADIENT_CLIPPING, GRADIENT_CLIPPING_DEFAULT)
    if clipping and not sharded and module.topology().get_dim("pipe") > 1:
        raise UnsupportedError(
            f"gradient_clipping={clipping} for a pipeline at ZeRO 0 (1.0 where the key is missing)",
            "DeepSpeed scales the gradients of all stages by the norm of the first one's",
            "zero_optimization.stage 1, or gradient_clipping 0",
        )


def settings_for(settings: dict[str, Any], module: Any, block: DeepSpeedOptions) -> dict[str, Any]:
    """Return DeepSpeed's settings for a pipeline, which checkpoint every layer unless they name an interval.

    `use_reentrant` is false unless they set it. A re-entrant checkpoint fails on a first layer that takes token ids,
    because no input of that layer has a gradient.

    Raises:
        UnsupportedError: activation_checkpointing.cpu_checkpointing.
    """
    settings = {key: value for key, value in settings.items() if key != "sequence_parallel_size"}
    if (settings.get("activation_checkpointing") or {}).get("cpu_checkpointing"):
        raise UnsupportedError(
            "activation_checkpointing.cpu_checkpointing for a pipeline",
            "no test compares it with one process",
            "dist_flash_attention.remat_offload, which keeps attention's output and lse on the host",
        )
    if block.options.checkpoints_layers:
        given = settings.get("pipeline") or {}
        interval = given.get("activation_checkpoint_interval") or module.activation_checkpoint_interval or 1
        settings["pipeline"] = {"use_reentrant": False, **given, "activation_checkpoint_interval": interval}
    return settings


def set_checkpointing(engine: Any, options: TrainingConfig) -> None:
    """Make the pipeline's checkpoints save attention's output and lse, or what they save in host memory, or both.

    DeepSpeed's own form without re-entrance becomes PyTorch's in any case: up to 0.19.7 it needs streams of a GPU.
    """
    from deepspeed.runtime.activation_checkpointing import checkpointing

    function = engine.module.activation_checkpoint_func
    if function is checkpointing.non_reentrant_checkpoint:  # it holds inputs where no hook finds them
        function = functools.partial(torch_checkpoint, use_reentrant=False)
    function = checkpoint_function(function, options.checkpoint, offload=options.remat_offload)
    engine.module.activation_checkpoint_func = function
