"""Distributed attention in Megatron-Core, by layer specs and replaced names.

In a Megatron script:        --context-parallel-size 8 --cp-comm-type dfa --spec dfa_megatron.megatron get_spec
                             (Megatron-Core 0.16: --spec dfa_megatron.megatron SPEC;
                             hybrid models: --spec dfa_megatron.megatron hybrid_stack_spec)
In a loop of your own:       distribute_attention(spec, config, config=options) returns the spec,
                             model(**shard_batch(batch, cp_group, options)) gives each rank its part
"""

from __future__ import annotations

import importlib.util
from typing import Any

from dfa_megatron.errors import UnsupportedError

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ImportError(
        "dfa_megatron.megatron needs Megatron-Core, which is not installed: pip install 'dfa_megatron[megatron]' or "
        "pip install megatron-core"
    )

try:
    from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
    from dfa_megatron.megatron.layers.layer import DistributedAttentionLayer
    from dfa_megatron.megatron.proved_job import prove
    from dfa_megatron.megatron.script import script_specs
    from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
    from dfa_megatron.megatron.script.script_specs import get_spec
    from dfa_megatron.megatron.spec import distribute_attention
    from dfa_megatron.megatron.tokens.batch import shard_batch
    from dfa_megatron.megatron.tokens.cuts import declare_batch_layout
except ImportError as error:  # which Megatron logs where --spec meets it, to go on with its own attention
    why = f"an import fails: {error}"
    raise UnsupportedError("this Megatron-Core", why, "the versions of docs/megatron.md, and what they need") from error

__all__ = [
    "DistributedAttentionLayer",
    "DistributedCoreAttention",
    "add_dfa_arguments",
    "declare_batch_layout",
    "distribute_attention",
    "get_spec",
    "options_of",
    "prove",
    "shard_batch",
]

_SPECS = {"SPEC": script_specs.spec_from_args, "hybrid_stack_spec": script_specs.hybrid_stack_spec}
"""What makes the objects for Megatron's --spec, which it finds in vars(module), when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _SPECS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        globals()[name] = _SPECS[name]()
    except ImportError as error:
        raise RuntimeError(f"dfa_megatron.megatron {name} cannot be made: {error}") from error
    return globals()[name]
