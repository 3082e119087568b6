"""Flags of `dfa-megatron run`, apart from the run, so that parsing needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from dfa_megatron.flags import flag
from dfa_megatron.names import KERNELS

TOLERANCE = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2}
"""The largest allowed error of a result, |got - want| / |want|."""


@dataclass(frozen=True)
class RunFlags:
    """The flags of the command."""

    plan: str = flag("", "the plan, as `dfa-megatron plan --text FILE` writes it", metavar="FILE", required=True)
    ranks: int | None = flag(None, "start so many processes, one per rank of the plan; else one runs all", metavar="N")
    device: str = flag("cpu", "where processes run, over gloo or NCCL", choices=("cpu", "cuda"))
    dtype: str = flag("float32", "of q, k and v", choices=tuple(TOLERANCE))
    kernel: str = flag("auto", "computes a block", choices=KERNELS)
    batch: int = flag(1, "sequences", metavar="N")
    heads: int = flag(4, "query heads", metavar="N")
    kv_heads: int = flag(2, "key and value heads", metavar="N")
    head_dim: int = flag(32, "of a head", metavar="N")
