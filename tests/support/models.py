"""Tiny models of the types that are tested, the same on every rank, and batches for them."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch

VOCABULARY = 61
LAYERS = 2
_LARGE_TOKENS = ("Phi3",)
"""Types whose special tokens lie beyond the vocabulary by default."""
TRAINING = {
    "max_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
    "learning_rate": 1e-2, "adam_epsilon": 1e-3, "use_cpu": True, "disable_tqdm": True, "report_to": [],
}  # fmt: skip
"""Arguments of a Trainer: a few steps, of which everything is told and nothing kept."""


def build(kind: str, seed: int = 0, heads: int = 4, kv_heads: int = 2, **changes: Any) -> Any:
    """A causal language model with eager attention, in float32 and training mode."""
    import transformers

    torch.manual_seed(seed)
    some = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} if kind in _LARGE_TOKENS else {}
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 8 * heads, "intermediate_size": 24, "num_hidden_layers": LAYERS,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    own = {**some, **sizes, "attn_implementation": "eager", **changes}
    config = getattr(transformers, f"{kind}Config")(**own)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(copy.deepcopy(config))
    for parameter in model.parameters():  # larger than at the start of a training, so that attention matters
        torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def text(batch: int, length: int, seed: int, unlabelled: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, and as their labels the tokens themselves but for the first `unlabelled` and for random holes.

    Two rows of three have a hole of half their length, so that a rank may have no label; the last label counts.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    labels = ids.clone()
    labels[:, :unlabelled] = -100
    holes = torch.rand(batch, length, generator=generator) < 0.2
    for row in range(batch):
        if (seed + row) % 3:
            first = int(torch.randint(length, (), generator=generator))
            holes[row, first : first + length // 2] = True
    holes[:, -1] = False
    labels[holes] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """The gradient of every parameter that is trained, by name."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}


def noise(name: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
    """Return random numbers that depend on a parameter's name alone, so that every rank can make the same ones."""
    seed = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
