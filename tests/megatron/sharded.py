"""Megatron's three wrappers of a model, on CPU too: its DDP, PyTorch's FSDP2 as Megatron uses it, and Megatron-FSDP."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def wrap(kind: str, config: Any, chunk: Any, **ddp: Any) -> Any:
    """A model chunk in `kind`: ddp, torch_fsdp2, or megatron_fsdp:STRATEGY; ddp are fields of Megatron's DDP config."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    if kind == "ddp":
        return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp), chunk)
    if kind == "torch_fsdp2":
        return _torch_fsdp2(config, DistributedDataParallelConfig(), chunk)
    given = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=kind.partition(":")[2],
        gradient_reduce_div_fusion=False,  # gloo cannot divide while it sums
        **ddp,
    )
    return _megatron_fsdp(config, given, chunk)


def finalizes(model: Any) -> bool:
    """Whether Megatron can finalize this wrapper's gradients: that of PyTorch's FSDP2 in 0.16 lacks an argument."""
    return "force_all_reduce" in inspect.signature(model.finish_grad_sync).parameters


def _torch_fsdp2(config: Any, ddp: Any, chunk: Any) -> Any:
    from megatron.core.distributed import torch_fully_sharded_data_parallel as home

    _meshes_on_cpu(home)
    return home.TorchFullyShardedDataParallel(config, ddp, chunk)


def _megatron_fsdp(config: Any, ddp: Any, chunk: Any) -> Any:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as home
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp

    # It asks einops, which is among nobody's requirements here, for the mesh of all ranks: one column without tensor
    # parallelism.
    home._get_dp_tp_mesh = lambda dp_cp, tp, ep_size=1: torch.arange(dp_cp.size())[:, None]
    if torch.cuda.is_available():
        return home.FullyShardedDataParallel(config, ddp, chunk)
    _meshes_on_cpu(home)
    megatron_fsdp.torch = _OnCpu()
    return home.FullyShardedDataParallel(config, ddp, chunk, device=torch.device("cpu"))


class _OnCpu:
    """The torch module with only one device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*_: Any) -> torch.device:
        return torch.device("cpu")


def _meshes_on_cpu(home: Any) -> None:
    """Literal "cuda" in the device meshes of a module of Megatron's."""
    real = home.DeviceMesh
    if torch.cuda.is_available() or real.__name__ == "CpuMesh":
        return

    class CpuMesh(real):  # type: ignore[misc,valid-type]
        @staticmethod
        def from_group(group: Any, device_type: str | None = None, *args: Any, **kwargs: Any) -> Any:
            return real.from_group(group, "cpu", *args, **kwargs)

    home.DeviceMesh = CpuMesh
