"""Megatron's three wrappers of a model, on CPU too: DDP, PyTorch's FSDP2 and Megatron-FSDP; and its optimizers."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.frameworks.compare import NORM, Found


def wrap(kind: str, config: Any, chunk: Any, **ddp: Any) -> Any:
    """A model chunk in `kind`: ddp, torch_fsdp2, or megatron_fsdp:STRATEGY; ddp are fields of Megatron's DDP config."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    if kind == "ddp":
        return DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), chunk)
    if kind == "torch_fsdp2":
        return _torch_fsdp2(config, DistributedDataParallelConfig(), chunk)
    given = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=kind.partition(":")[2],
        gradient_reduce_div_fusion=False,  # gloo cannot divide while it sums
        **ddp,
    )
    return _megatron_fsdp(config, given, chunk)


def optimizer_of(kind: str, models: list[Any], *, overlap: bool = False) -> Any:
    """Return Adam: of PyTorch, Megatron's around it, or spread over data ranks; None for ""."""
    if kind in ("", "torch"):
        every = [p for model in models for p in model.parameters()]
        return torch.optim.Adam(every, lr=2e-3, eps=1e-6) if kind else None
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chosen = OptimizerConfig(
        optimizer="adam",
        lr=2e-3,
        min_lr=2e-3,
        weight_decay=0.0,
        adam_beta2=0.999,
        adam_eps=1e-6,
        clip_grad=1e9,  # clips nothing, but asks for the norm
        use_distributed_optimizer=kind == "distributed",
        overlap_param_gather=overlap,
    )
    return get_megatron_optimizer(chosen, models)


def move(optimizer: Any, models: list[Any], found: Found) -> None:
    """Move the weights, and add the norm that Megatron's optimizers find over all ranks."""
    parameters = [p for model in models for p in model.parameters()]
    for p in parameters if isinstance(optimizer, torch.optim.Optimizer) else ():
        p.grad = p.main_grad if hasattr(p, "main_grad") else p.grad
    stepped = optimizer.step()
    if stepped:
        found.gradients[NORM] = torch.tensor(stepped[1])
    for p in parameters:
        p.grad = None  # left in place, autograd would add the next gradient to main_grad, and DDP once more


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
