"""Functions that the patch in patches/megatron-lm calls from a Megatron-LM clone; only the patch uses this file.

In a patched clone `--cp-comm-type dfa` alone, without --spec, makes Megatron's default model distributed. The parser
knows the `--dfa-*` flags. Without `--cp-comm-type dfa` every function returns Megatron's own value.
"""

from __future__ import annotations

from typing import Any

from dfa_megatron.megatron.proved_job import prove_if_asked
from dfa_megatron.megatron.spec import distribute_attention, distribute_prediction
from dfa_megatron.megatron.start.dfa_flags import global_args, options_of


def asked_for(config: Any) -> bool:
    """Return whether a TransformerConfig has --cp-comm-type dfa; in a list per layer all must be dfa."""
    asked = getattr(config, "cp_comm_type", None)
    return asked == "dfa" or (isinstance(asked, list) and bool(asked) and set(asked) == {"dfa"})


def layer_spec(spec: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the decoder spec that Megatron chose, with distributed attention if the config requests it."""
    if not asked_for(config):
        return spec
    prove_if_asked(global_args())
    return distribute_attention(spec, config, config=options_of(), vp_stage=vp_stage)


def prediction_spec(spec: Any, config: Any) -> Any:
    """Return the spec of a multi-token prediction layer likewise."""
    return distribute_prediction(spec, config) if asked_for(config) else spec
