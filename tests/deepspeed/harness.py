"""A tiny model on DeepSpeed with distributed attention, beside the same model on one rank; nothing is compiled."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist


def prepare_worker(rank: int) -> None:
    """What a launcher would have done, one thing for speed, and one for equal answers on every processor."""
    import deepspeed

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
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


def mean_over_ranks(value: torch.Tensor) -> float:
    """The loss of the whole batch, from the loss of every rank."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()
