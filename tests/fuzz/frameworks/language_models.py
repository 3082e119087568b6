"""Tiny models of transformers with random shapes, and whole batches for them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.huggingface.tried import TRIED
from tests.fuzz.frameworks import uneven
from tests.fuzz.outcome import Draw
from tests.huggingface.sweep import images, tiny
from tests.support.models import VOCABULARY, build
from tests.support.packs import random_offsets

_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_DELTA = {
    **_SPARSE,
    "shared_expert_intermediate_size": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": [3, 9, 64]},
    "Qwen2": {"use_sliding_window": [False, True], "sliding_window": [2, 7], "max_window_layers": [0, 1]},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"attn_logit_softcapping": [None, 3.0], "sliding_window": [2, 7]},
    "Gemma3Text": {"sliding_window": [2, 7], "layer_types": [_MIXED]},
    "GptOss": {**{name: [x] for name, x in _EXPERTS.items()}, "sliding_window": [2, 7, 64]},
    "Mixtral": {**{name: [x] for name, x in _EXPERTS.items()}, "sliding_window": [None, 5]},
    "Qwen2Moe": {**{name: [x] for name, x in _SPARSE.items()}, "shared_expert_intermediate_size": [16]},
    "Qwen3Moe": {name: [x] for name, x in _SPARSE.items()},
    "Phi3": {"sliding_window": [None, 4]},
    "Olmo2": {},
    "Cohere": {},
    "Granite": {},
    "Qwen3Next": {name: [x] for name, x in _DELTA.items()},
    "Lfm2": {"layer_types": [["conv", "full_attention"]]},
}
"""Types, and the values that a field of each is drawn from."""

HYBRIDS = ("Qwen3Next", "Lfm2")
DELTA_RULES = ("kimi_linear", "olmo_hybrid", "qwen3_5", "qwen3_next")
"""In the names of types that make rules in float32, which differ from float64 by 1e-4 without us, too."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Whole batches, one for each micro-batch of each sequence.

    pack: "", "position_ids", "cu_seq_lens" or "both". padding: "", "right" or "left", beside an attention mask.
    masks: of the batches, by `uneven.counted`.
    """

    seed: int
    rows: int
    tokens: int
    parts: int
    pack: str
    padding: str
    masks: tuple[str, ...]

    @property
    def batches(self) -> tuple[dict[str, torch.Tensor], ...]:
        """Return those of the step, as transformers' collators make them."""
        return tuple(self.batch(number) for number in range(len(self.masks)))

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Return the batch of a number; of earlier steps, too."""
        seed = (self.seed * 1009 + number) % 2**31
        generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
        ids = torch.randint(3, VOCABULARY, (self.rows, self.tokens), generator=generator)
        counts = uneven.counted(self.masks[number % len(self.masks)], self.rows, self.tokens, self.parts, seed)
        found = {"input_ids": ids, "labels": ids.masked_fill(~counts, IGNORED)}
        if self.pack:
            cuts = [random_offsets(self.tokens, dice, 24) for _ in range(self.rows)]
            places = uneven.positions(cuts)
            found["labels"][places == 0] = IGNORED
            if self.pack != "cu_seq_lens":
                found["position_ids"] = places
            if self.pack != "position_ids":
                every = [0] + [row * self.tokens + end for row, cut in enumerate(cuts) for end in cut[1:]]
                found |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(every).int())
        if self.padding:
            ends = torch.tensor([dice.randint(1, self.tokens) for _ in range(self.rows)])[:, None]
            real = torch.arange(self.tokens) < ends
            real = real if self.padding == "right" else real.flip(1)
            found["attention_mask"] = real.long()
            found["labels"] = found["labels"].masked_fill(~real, IGNORED)
        self._count_one(found, number)
        return found

    def _count_one(self, found: dict[str, torch.Tensor], number: int) -> None:
        """Label a token, if there is none and the mask is not of nothing."""
        if self.masks[number % len(self.masks)] == "nothing" or (found["labels"][:, 1:] != IGNORED).any():
            return
        follows = found["attention_mask"].bool() if self.padding else torch.ones_like(found["labels"], dtype=torch.bool)
        follows[:, 0] = False
        for row, first, _ in self.documents(number):
            follows[row, first] = False
        if len(places := follows.nonzero()):
            row, token = places[len(places) // 2].tolist()
            found["labels"][row, token] = found["input_ids"][row, token]

    @property
    def labels(self) -> int:
        """Return how many tokens of all batches have a label that follows them."""
        return sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in self.batches)

    def documents(self, number: int) -> list[tuple[int, int, int]]:
        """Return the row, the first token and the end of each document."""
        if not self.pack:
            return [(row, 0, self.tokens) for row in range(self.rows)]
        seed = (self.seed * 1009 + number) % 2**31
        dice = random.Random(seed)
        cuts = [random_offsets(self.tokens, dice, 24) for _ in range(self.rows)]
        return [(row, lo, hi) for row, cut in enumerate(cuts) for lo, hi in pairwise(cut)]

    def summed(self, model: Any, number: int) -> tuple[torch.Tensor, int]:
        """Return the summed loss of one batch on one rank, one document after another, and how many tokens count."""
        batch = self.batches[number]
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
        if self.pack:
            parts = [
                model(input_ids=batch["input_ids"][row : row + 1, lo:hi], use_cache=False).logits
                for row, lo, hi in self.documents(number)
            ]
            logits = torch.cat(parts, 1)
        else:
            more = {"attention_mask": batch["attention_mask"]} if self.padding else {}
            logits = model(input_ids=batch["input_ids"], use_cache=False, **more).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss, int((labels != IGNORED).sum())


@dataclass(frozen=True, kw_only=True)
class LanguageDraw(Draw):
    """One step of all its ranks: `size` of them share each of the `sequences`.

    kind, model: of `made`. data: a batch for each micro-batch of each sequence. options: of `TrainingConfig`.
    loss: "own", of the model; "items", the same with one number of items for all micro-batches; or "function", ours.
    warm: other steps before this one, after which attentions are replayed.
    """

    size: int
    sequences: int
    kind: str
    model: dict[str, Any]
    data: Data
    options: dict[str, Any]
    reentrant: bool
    loss: str
    warm: int

    @property
    def ranks(self) -> int:
        """Return how many ranks run it."""
        return self.size * self.sequences

    @property
    def start(self) -> tuple[int, ...]:
        """Return what a mesh of ranks depends on."""
        return (self.size,)

    def features(self) -> list[str]:
        """Return the names of the features that a run counts."""
        found = [self.kind, f"{self.size} x {self.sequences} ranks", f"loss {self.loss}"]
        found += [f"pack {self.data.pack or 'none'}", *{f"mask {mask}" for mask in self.data.masks}]
        having = {
            f"checkpoint {self.options['checkpoint']}": True,
            f"padding {self.data.padding}": self.data.padding,
            "re-entrant": self.reentrant,
            "loss_tile": self.options["loss_tile"] != "off",
            "accumulation": len(self.data.masks) > self.sequences,
            f"after {self.warm} steps": self.warm,
        }
        return found + [name for name, there in having.items() if there]


def draw_data(dice: random.Random, seed: int, parts: int, batches: int, kind: str) -> Data:
    """Draw batches for a sequence that `parts` ranks share."""
    pack = dice.choice(["", "", "position_ids", "position_ids", "cu_seq_lens", "both"])
    padding = dice.choice(["", "", "right", "right"]) if not pack and kind in MODELS and kind not in HYBRIDS else ""
    padding = "left" if padding and dice.random() < 0.1 else padding
    rows = dice.choice([1, 1, 2, 3])
    return Data(
        seed=seed,
        rows=rows,
        tokens=parts * dice.choice([2, 3, 5, 8, 13]),
        parts=parts,
        pack=pack,
        padding=padding,
        masks=tuple(dice.choice([*uneven.MASKS, "nothing"]) for _ in range(batches)),
    )


def draw_model(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw a type and arguments of `build`."""
    kind = dice.choice([*MODELS])
    kv_heads = dice.choice([1, 1, 2, 3])
    heads = kv_heads * dice.choice([1, 2, 3])
    changes = {name: dice.choice(values) for name, values in MODELS[kind].items()}
    return kind, {"heads": heads, "kv_heads": kv_heads, **changes, "tie_word_embeddings": dice.random() < 0.4}


def draw_type(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw one of all types that are exact and make a model alone, of fixed shapes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ALONE

    return dice.choice([kind for kind in TRIED if kind in ALONE and kind not in images.WHOLE]), {"heads": 4}


def made(kind: str, changes: dict[str, Any], seed: int, experts: str = "eager") -> Any:
    """Return the model in float64."""
    if kind not in MODELS:
        return tiny.build(kind)
    return build(kind, seed, experts_implementation=experts, **changes).double()
