"""The specs of Megatron's scripts: for their `--spec` flag, and for the patch of patches/megatron-lm.

In a patched clone `--cp-comm-type dfa` alone, without --spec, makes Megatron's default model distributed.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.proved_job import prove_if_asked
from dfa_megatron.megatron.replace import replace
from dfa_megatron.megatron.script.dfa_flags import global_args, options_of
from dfa_megatron.megatron.spec import distribute_attention

_NOT_IN_SPEC = (
    "kitchen_config_file", "kitchen_recipe_number", "mla_down_proj_fusion", "num_experts",
    "use_grouped_gemm_for_dense_mlp", "use_kitchen", "use_te_activation_func",
)  # fmt: skip
"""Flags that Megatron's default spec honours in some versions, and the one that is made here does not."""


def get_spec(model_cfg: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's default spec, distributed, for `--spec dfa_megatron.megatron get_spec` (0.19 and later).

    Options come from the script's `--dfa-*` flags (see script/dfa_flags.py). A script without them gets layout
    boundary, which works with Megatron's own batches.

    Args:
        model_cfg: Megatron's GPTModelConfig.
        vp_stage: the virtual pipeline stage that is being built.
    """
    from megatron.training.models.gpt import default_layer_spec

    prove_if_asked(global_args())
    _distribute_predictions()
    given = [model_cfg, vp_stage] if "vp_stage" in inspect.signature(default_layer_spec).parameters else [model_cfg]
    return distribute_attention(default_layer_spec(*given), model_cfg.transformer, config=options_of())


def hybrid_stack_spec() -> Any:
    """Return Megatron's hybrid stack spec, distributed, for `--spec dfa_megatron.megatron hybrid_stack_spec`."""
    prove_if_asked(global_args())
    return distribute_attention(default_stack_spec(), config=options_of())


def default_stack_spec() -> Any:
    """Return Megatron's own hybrid_stack_spec (called mamba_stack_spec in 0.16)."""
    try:
        if (MAJOR, MINOR) < (0, 19):
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
        else:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
    except ImportError as error:
        raise UnsupportedError(
            "Megatron's hybrid stack spec",
            f"it cannot be imported: {error}",
            "an installation with Transformer Engine, or distribute_attention of a stack spec of your own",
        ) from error
    return spec


def spec_from_args() -> Any:
    """Return the object for `--spec dfa_megatron.megatron SPEC` (scripts of Megatron-Core 0.16 take no function)."""
    args = global_args()
    if args is None:
        raise UnsupportedError(
            "SPEC outside a Megatron script",
            "it is made from Megatron's global arguments",
            "distribute_attention(spec, transformer_config, config=...)",
        )
    prove_if_asked(args)
    _distribute_predictions()
    on = [f"--{name.replace('_', '-')}" for name in _NOT_IN_SPEC if getattr(args, name, None) not in (None, False)]
    if on:
        raise UnsupportedError(
            f"SPEC with {', '.join(on)}",
            "the spec that is made here does not have it",
            "leaving it out, distribute_attention in a model provider of your own, or Megatron-Core 0.19 and get_spec",
        )
    shared = {
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
        "qk_l2_norm": args.qk_l2_norm,
    }
    if args.transformer_impl == "transformer_engine":
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**shared)
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=args.normalization, **shared)
    return distribute_attention(layer, config=options_of(args))


def _distribute_predictions() -> None:
    """Make the layers of multi-token prediction that a script builds distributed; Megatron makes their spec itself."""

    def replacing(megatrons: Any) -> Any:
        return lambda config, spec, *args, **kwargs: megatrons(
            config, distribute_prediction(spec, config), *args, **kwargs
        )

    replace(gpt_layer_specs, "get_gpt_mtp_block_spec", replacing)


def distribute_prediction(spec: Any, config: Any) -> Any:
    """Return the distributed spec of a prediction layer from its own, or from a decoder's, whose last layer it is."""
    layers = spec.layer_specs[-1:] if isinstance(spec, TransformerBlockSubmodules) else [spec]
    # A block, because Megatron accepts a layer spec only if its class is exactly TransformerLayer.
    return distribute_attention(TransformerBlockSubmodules(layer_specs=layers), config, config=options_of())


def _asked_for(config: Any) -> bool:
    """Return whether a TransformerConfig has --cp-comm-type dfa; in a list per layer all must be dfa."""
    asked = getattr(config, "cp_comm_type", None)
    return asked == "dfa" or (isinstance(asked, list) and bool(asked) and set(asked) == {"dfa"})


def layer_spec(spec: Any, config: Any, _vp_stage: int | None = None) -> Any:
    """Return the decoder spec that Megatron chose, with distributed attention if the config requests it.

    The patches also pass the virtual stage on, of which nothing depends.
    """
    if not _asked_for(config):
        return spec
    prove_if_asked(global_args())
    return distribute_attention(spec, config, config=options_of())


def prediction_spec(spec: Any, config: Any) -> Any:
    """Return the spec of a multi-token prediction layer likewise."""
    return distribute_prediction(spec, config) if _asked_for(config) else spec
