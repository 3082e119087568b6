"""A tiny model on DeepSpeed with distributed attention, beside the same model on one rank; nothing is compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron import deepspeed as dfa_ds
from tests.huggingface import test_trainer
from tests.support.models import build


def prepare_worker(rank: int) -> None:
    """What a launcher would have done, one thing for speed, and one for equal answers on every processor."""
    import deepspeed

    test_trainer.prepare_worker(rank, dist.get_world_size())
    # DeepSpeed would compile an operator for inference at its first use, which takes minutes and serves no test.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # ZeRO 3 would refuse float64 where the processor has float16, and takes it elsewhere.
    deepspeed.get_accelerator().is_fp16_supported = lambda: False


BUCKETS = {
    **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "allgather_partitions"), False),
    **dict.fromkeys(("overlap_comm", "enable_sanity_checks", "log_trace_cache_warnings"), True),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size", "stage3_max_live_parameters"), 3_000),
    **dict.fromkeys(("sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"), 2_000),
}
"""Keys of ZeRO that change how gradients and parameters travel, and no gradient."""


def settings(stage: int, size: int | None = None, **block: Any) -> dict[str, Any]:
    """A configuration whose gradients can be compared: no clipping, and parameters that do not move."""
    if size is not None:
        block["size"] = size
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 64},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "dist_flash_attention": {"enabled": True, **block},
    }


def engine_of(config: dict[str, Any], model: Any = None, initialize: Any = dfa_ds.initialize) -> Any:
    """An engine that trains a model, or Qwen3."""
    model = build("Qwen3") if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return initialize(model=model, model_parameters=trained, config=config)[0]


def step(engine: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a step, or of a micro-batch of one."""
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    found: torch.Tensor = loss.detach()
    return found


def mean_over_ranks(value: torch.Tensor) -> float:
    """The loss of the whole batch, from the loss of every rank."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
