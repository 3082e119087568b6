"""PEFT's adapters that may depend on the tokens of a whole sequence, where a rank has a part of it."""

from __future__ import annotations

from typing import Any

from dfa_megatron.errors import UnsupportedError

_EACH_TOKEN = (
    "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "RANDLORA", "ROAD", "SHIRA",
    "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT",
)  # fmt: skip
"""Types of PEFT's adapters that treat each token alone, and alike on every rank: each was compared with one process."""

_ACROSS = (
    *("alora_invocation_tokens", "arrow_config", "monteclora_config", "velora_config"),
    *("boft_dropout", "module_dropout", "rank_dropout"),
)
"""Options by which one of these reads the tokens of this rank, or draws random weights, others on each rank."""


def check_adapters(model: Any) -> None:
    """Refuse PEFT's adapters that may depend on the tokens of a whole sequence.

    Raises:
        UnsupportedError: a model has one; it is named.
    """
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, dict) else ():
        kind = getattr(config.peft_type, "value", config.peft_type)
        kind = next((f"{kind} with {name}" for name in _ACROSS if getattr(config, name, None)), kind)
        if kind not in _EACH_TOKEN:
            raise UnsupportedError(
                f"PEFT's adapter of type {kind}",
                "it is not known to treat each token alone, and alike on every rank",
                "an adapter that is, such as LORA and IA3 without random weights",
            )
