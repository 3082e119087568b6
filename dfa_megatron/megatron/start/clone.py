"""Functions that the patch in patches/megatron-lm calls from a Megatron-LM clone; only the patch uses this file.

In a patched clone `--cp-comm-type dfa` alone, without --spec, makes Megatron's default model distributed. The parser
knows the `--dfa-*` flags. Without `--cp-comm-type dfa` every function returns Megatron's own value.
"""

from __future__ import annotations

import inspect
from typing import Any

from dfa_megatron.megatron.selfcheck.at_start import check_if_asked
from dfa_megatron.megatron.spec import distribute_attention
from dfa_megatron.megatron.start.dfa_flags import global_args, options_of
from dfa_megatron.megatron.start.script import slice_in_order
from dfa_megatron.megatron.tokens.others import refuse_other_layers


def asked_for(config: Any) -> bool:
    """Return whether a TransformerConfig has --cp-comm-type dfa; in a list per layer all must be dfa."""
    asked = getattr(config, "cp_comm_type", None)
    return asked == "dfa" or (isinstance(asked, list) and bool(asked) and set(asked) == {"dfa"})


def _in_order() -> bool:
    """Return whether the script's batches are sliced in order; False without checks in a run without our flags."""
    return getattr(global_args(), "dfa_data_layout", "boundary") == "contiguous"


def layer_spec(spec: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the decoder spec that Megatron chose, with distributed attention if the config requests it."""
    if _in_order():
        refuse_other_layers()
    if not asked_for(config):
        return spec
    check_if_asked(global_args())
    return distribute_attention(spec, config, config=options_of(), vp_stage=vp_stage)


def prediction_spec(spec: Any, config: Any) -> Any:
    """Return the spec of a multi-token prediction layer likewise, for the order of the script's batches."""
    if not asked_for(config):
        return spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    options = options_of()
    if options.data_layout == "boundary":  # which would exchange hidden states around each
        options = options.replace(data_layout="zigzag", schedule="auto")
    # A block, because Megatron accepts a layer spec only if its class is exactly TransformerLayer.
    return distribute_attention(TransformerBlockSubmodules(layer_specs=[spec]), config, config=options)


def get_batch_on_this_cp_rank(*args: Any, **kwargs: Any) -> Any:
    """Slice as Megatron's function of that name, or in order with --dfa-data-layout contiguous."""
    from megatron.core import utils

    megatrons = utils.get_batch_on_this_cp_rank
    if not _in_order():
        return megatrons(*args, **kwargs)
    return slice_in_order(options_of(), inspect.signature(megatrons), *args, **kwargs)
