"""DISTFLASHATTN for Megatron-Core and DeepSpeed: exact attention over a sequence sharded across ranks.

The public names are loaded on first use, so that `import dfa_megatron` costs nothing and planning needs no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_HOME = {
    "DistAttentionConfig": "dfa_megatron.config",
    "DistFlashAttention": "dfa_megatron.attention",
    "MegatronConfig": "dfa_megatron.config",
    "allow_more_heads_than_tokens": "dfa_megatron.runtime.request",
    "TrainingConfig": "dfa_megatron.config",
    "check_plan": "dfa_megatron.plan.proof.check",
    "decode_attn_func": "dfa_megatron.sequence.decode",
    "dist_flash_attn_func": "dfa_megatron.attention",
    "dist_flash_attn_varlen_func": "dfa_megatron.attention",
    "draw": "dfa_megatron.cli.draw",
    "local_positions": "dfa_megatron.sharding",
    "make_plan": "dfa_megatron.plan.cost.choose",
    "max_logits": "dfa_megatron.sequence.max_logits",
    "plan_batches": "dfa_megatron.batches",
    "roll_sequence": "dfa_megatron.sequence.roll",
    "shard_sequence": "dfa_megatron.sharding",
    "simulate": "dfa_megatron.plan.cost.choose",
    "stats": "dfa_megatron.runtime.counters",
    "tree_positions": "dfa_megatron.sharding",
    "unshard_sequence": "dfa_megatron.sharding",
    "with_blocks": "dfa_megatron.plan.schedules",
}

if TYPE_CHECKING:
    from dfa_megatron.attention import DistFlashAttention as DistFlashAttention
    from dfa_megatron.attention import dist_flash_attn_func as dist_flash_attn_func
    from dfa_megatron.attention import dist_flash_attn_varlen_func as dist_flash_attn_varlen_func
    from dfa_megatron.batches import plan_batches as plan_batches
    from dfa_megatron.cli.draw import draw as draw
    from dfa_megatron.config import DistAttentionConfig as DistAttentionConfig
    from dfa_megatron.config import MegatronConfig as MegatronConfig
    from dfa_megatron.config import TrainingConfig as TrainingConfig
    from dfa_megatron.plan.cost.choose import make_plan as make_plan
    from dfa_megatron.plan.cost.choose import simulate as simulate
    from dfa_megatron.plan.proof.check import check_plan as check_plan
    from dfa_megatron.plan.schedules import with_blocks as with_blocks
    from dfa_megatron.runtime.counters import stats as stats
    from dfa_megatron.runtime.request import allow_more_heads_than_tokens as allow_more_heads_than_tokens
    from dfa_megatron.sequence.decode import decode_attn_func as decode_attn_func
    from dfa_megatron.sequence.max_logits import max_logits as max_logits
    from dfa_megatron.sequence.roll import roll_sequence as roll_sequence
    from dfa_megatron.sharding import local_positions as local_positions
    from dfa_megatron.sharding import shard_sequence as shard_sequence
    from dfa_megatron.sharding import tree_positions as tree_positions
    from dfa_megatron.sharding import unshard_sequence as unshard_sequence

__all__ = sorted({*_HOME, "__version__"})


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]
