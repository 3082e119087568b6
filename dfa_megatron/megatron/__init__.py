"""Distributed attention in Megatron-Core, by layer specs and replaced names.

In a Megatron script:        --context-parallel-size 8 --cp-comm-type dfa --spec dfa_megatron.megatron get_spec
                             (Megatron-Core 0.16: --spec dfa_megatron.megatron SPEC;
                             hybrid models: --spec dfa_megatron.megatron hybrid_stack_spec)
In a loop of your own:       distribute_attention(spec, config, config=options) returns the spec,
                             shard_batch(batch, cp_group, options) slices the data
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    raise ImportError(
        "dfa_megatron.megatron needs Megatron-Core, which is not installed: pip install 'dfa_megatron[megatron]' or "
        "pip install megatron-core"
    )

if TYPE_CHECKING:
    from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
    from dfa_megatron.megatron.layers.layer import DistributedAttentionLayer
    from dfa_megatron.megatron.proved_job import prove
    from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
    from dfa_megatron.megatron.script.script_specs import get_spec
    from dfa_megatron.megatron.spec import distribute_attention
    from dfa_megatron.megatron.tokens.batch import declare_batch_layout, shard_batch
    from dfa_megatron.megatron.tokens.packed_documents import packed_seq_params

    SPEC: Any
    hybrid_stack_spec: Any

__all__ = [
    "DistributedAttentionLayer",
    "DistributedCoreAttention",
    "add_dfa_arguments",
    "declare_batch_layout",
    "distribute_attention",
    "get_spec",
    "options_of",
    "packed_seq_params",
    "prove",
    "shard_batch",
]

_HOME = {
    "DistributedAttentionLayer": "layers.layer",
    "DistributedCoreAttention": "layers.core_attention",
    "add_dfa_arguments": "script.dfa_flags",
    "declare_batch_layout": "tokens.batch",
    "distribute_attention": "spec",
    "options_of": "script.dfa_flags",
    "packed_seq_params": "tokens.packed_documents",
    "prove": "proved_job",
    "shard_batch": "tokens.batch",
}

_SPECS = {"SPEC": "spec_from_args", "hybrid_stack_spec": "hybrid_stack_spec"}
"""Objects for Megatron's --spec, made when they are first asked for, by these functions of script_specs.py.

They are not in `__all__`: outside of a Megatron script they cannot be made.
"""


def __getattr__(name: str) -> Any:
    if name == "get_spec" or name in _SPECS:
        # Stored in the module, because Megatron reads vars(module). No ImportError: Megatron logs one and continues
        # with its own attention.
        try:
            spec = importlib.import_module(f"{__name__}.script.script_specs")
            globals()[name] = getattr(spec, _SPECS[name])() if name in _SPECS else spec.get_spec
        except ImportError as error:
            raise RuntimeError(f"dfa_megatron.megatron {name} cannot be made: {error}") from error
        return globals()[name]
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
