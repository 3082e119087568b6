"""Build the small model on a rank, with weights that depend on their names alone, and random batches for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.selfcheck.small import ROWS
from dfa_megatron.selfcheck.train import noise

SAMPLES = 2
"""Rows of a batch."""


def build(config: Mapping[str, Any]) -> Any:
    """Return the model of the shrunk config in float32, in training mode, with transformers' eager attention."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(7)
    made = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    return with_noise(AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32)).train()


def with_noise(model: Any) -> Any:
    """Return the model with random weights that depend on their names alone, so that every rank makes the same ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = noise(name, parameter.shape)
            if name.endswith("A_log"):  # states that last for several tokens, so that what comes in matters
                parameter.copy_(0.5 * random - 2)
            # Larger than at the start of a training, so that attention matters.
            elif parameter.dim() > 1:
                parameter.copy_(random / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * random)
    return model


def batch_of(words: int, ranks: int, seed: int, samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    """Return rows of random tokens and their labels, (samples, tokens); the first rank has fewer labels than others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(words, (samples, ROWS * ranks), generator=generator)
    labels = ids.clone()
    labels[:, : ROWS // 2] = IGNORED
    labels[:, ROWS // 2 :: 5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Return the label of the next token; none for the last."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def loss_of_each_token(logits: torch.Tensor, shift_labels: torch.Tensor) -> torch.Tensor:
    """Return the losses (samples, tokens), 0 where there is no label."""
    return torch.nn.functional.cross_entropy(
        logits.detach().transpose(1, 2), shift_labels, ignore_index=IGNORED, reduction="none"
    )
