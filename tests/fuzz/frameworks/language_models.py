"""Tiny models of transformers with random shapes, and whole batches for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.huggingface.check_model import TRIED
from dfa_megatron.loss.scores import IGNORED
from tests.fuzz.frameworks import uneven
from tests.fuzz.outcome import Draw
from tests.huggingface.one_process import segments
from tests.huggingface.sweep import images, tiny
from tests.support.models import VOCABULARY, build
from tests.support.packs import random_offsets
from tests.support.plan_cases import heterogeneous_masks, some_parents

MIXED = ["sliding_attention", "full_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
_DELTA = {
    **_SPARSE, **images.DELTA, "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Mistral": {"sliding_window": [3, 9, 64]},
    "Qwen2": {"use_sliding_window": [False, True], "sliding_window": [2, 7], "max_window_layers": [0, 1]}, "Qwen3": {},
    "Gemma": {}, "Gemma2": {"attn_logit_softcapping": [None, 3.0], "sliding_window": [2, 7]},
    "Gemma3Text": {"sliding_window": [2, 7], "layer_types": [MIXED]},
    "GptOss": {**{name: [x] for name, x in EXPERTS.items()}, "sliding_window": [2, 7, 64]},
    "Mixtral": {**{name: [x] for name, x in EXPERTS.items()}, "sliding_window": [None, 5]},
    "Qwen2Moe": {**{name: [x] for name, x in _SPARSE.items()}, "shared_expert_intermediate_size": [16]},
    "Qwen3Moe": {name: [x] for name, x in _SPARSE.items()}, "Phi3": {"sliding_window": [None, 4]}, "Olmo2": {},
    "Cohere": {}, "Granite": {}, "Qwen3Next": {name: [x] for name, x in _DELTA.items()},
    "Lfm2": {"layer_types": [["conv", "full_attention"]]},
}  # fmt: skip
"""Types, and the values that a field of each is drawn from."""

HYBRIDS = ("Qwen3Next", "Lfm2")
STATES = {kind for kind, layers in TRIED.items() if layers & {"conv", "hybrid", "linear_attention"}}
"""Types that make some layers in float32, which differ from float64 by 1e-4 without us, too."""
PLAIN = {*MODELS} - {*HYBRIDS}
"""Types of which every layer has an attention."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Whole batches, one for each micro-batch of each sequence.

    pack: "", "position_ids", "cu_seq_lens" or "both" for documents; "tree"; or "mask", any.
    padding: "", "right" or "left", beside an attention mask.
    masks: of the losses, by `uneven.counted`.
    starts, parents: where documents or segments begin, and what is above each segment; drawn if there are none.
    told: what all batches say beside this.
    """

    seed: int
    rows: int
    tokens: int
    parts: int
    pack: str = ""
    padding: str = ""
    masks: tuple[str, ...] = ("holes",)
    starts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, number: int) -> dict[str, Any]:
        """Return the batch of a number, as transformers' collators make them; of earlier steps, too."""
        seed = (self.seed * 1009 + number) % 2**31
        generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
        ids = torch.randint(3, VOCABULARY, (self.rows, self.tokens), generator=generator)
        counts = uneven.counted(self.masks[number % len(self.masks)], self.rows, self.tokens, self.parts, seed)
        found: dict[str, Any] = {"input_ids": ids, "labels": ids.masked_fill(~counts, IGNORED)}
        if self.pack == "mask":
            every = [case.mask for case in heterogeneous_masks(self.tokens, dice) if case.sees_itself]
            found["mask"] = dice.choice(every)
        elif self.pack:
            found |= self._documents(dice)
        found |= self.told
        for row, (offsets, parents) in enumerate(segments(found)):
            apart = [at for at, start in enumerate(offsets[:-1]) if at and (not parents or parents[at] != at - 1)]
            found["labels"][row, [offsets[at] for at in apart]] = IGNORED
        if self.padding:
            ends = torch.tensor([dice.randint(1, self.tokens) for _ in range(self.rows)])[:, None]
            real = torch.arange(self.tokens) < ends
            real = real if self.padding == "right" else real.flip(1)
            found["attention_mask"] = real.long()
            found["labels"] = found["labels"].masked_fill(~real, IGNORED)
        self._count_one(found, number)
        return found

    @property
    def labels(self) -> int:
        """Return how many tokens of all batches have a label that follows them."""
        every = (self.batch(number)["labels"][:, 1:] for number in range(len(self.masks)))
        return sum(int((labels != IGNORED).sum()) for labels in every)

    def _documents(self, dice: random.Random) -> dict[str, Any]:
        """Return what tells the documents of all rows, or the tree."""
        ends = (*self.starts, self.tokens)
        cuts = [ends if self.starts else random_offsets(self.tokens, dice, 24) for _ in range(self.rows)]
        if self.pack == "tree":
            lengths = [hi - lo for lo, hi in pairwise(cuts[0])]
            return {"prompt_tree": (lengths, self.parents or some_parents(len(lengths), dice))}
        every = [0] + [row * self.tokens + end for row, cut in enumerate(cuts) for end in cut[1:]]
        offsets = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(every).int())
        places = {"position_ids": uneven.positions(cuts)}
        return {"position_ids": places, "cu_seq_lens": offsets, "both": places | offsets}[self.pack]

    def _count_one(self, found: dict[str, Any], number: int) -> None:
        """Label a token, if there is none and the mask is not of nothing."""
        if self.masks[number % len(self.masks)] == "nothing" or (found["labels"][:, 1:] != IGNORED).any():
            return
        follows = found["attention_mask"].bool() if self.padding else torch.ones_like(found["labels"], dtype=torch.bool)
        for row, (offsets, _) in enumerate(segments(found)):
            follows[row, list(offsets[:-1])] = False
        if len(places := follows.nonzero()):
            row, token = places[len(places) // 2].tolist()
            found["labels"][row, token] = found["input_ids"][row, token]


OPTIONS: dict[str, Any] = {
    "checkpoint": "none", "schedule": "auto", "kernel": "auto", "loss_tile": "off", "remat_offload": False,
    "ulysses_degree": "auto", "verify": "on",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LanguageDraw(Draw):
    """One step of all its ranks: `size` of them share each of the `sequences`.

    name: of a draw by hand. kind, model: of `made`. data: a batch for each micro-batch of each sequence.
    options: of `TrainingConfig`.
    loss: "own", of the model; "items", the same with one number of items for all micro-batches; or "function", ours.
    warm: other steps before this one, after which attentions are replayed.
    images: a model of several parts gets some. plant: makes a fault on several ranks.
    """

    seed: int = 0
    name: str = ""
    size: int
    sequences: int = 1
    kind: str
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Data
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)
    reentrant: bool = False
    loss: str = "own"
    warm: int = 0
    images: bool = True
    plant: Callable[[], AbstractContextManager[Any]] | None = None

    @property
    def ranks(self) -> int:
        """Return how many ranks run it."""
        return self.size * self.sequences

    @property
    def start(self) -> tuple[int, ...]:
        """Return what a mesh of ranks depends on."""
        return (self.size,)

    @property
    def line(self) -> str:
        """Return its name, or the command that runs it again."""
        return self.name or super().line

    @property
    def has_states(self) -> bool:
        """Return whether some layers have states, which they make in float32."""
        return self.kind in HYBRIDS or self.kind.split()[0] in STATES

    def batch(self, model: Any, number: int) -> dict[str, Any]:
        """Return a whole batch, with images if the model has several parts."""
        batch = self.data.batch(number)
        return images.add_images(model, self.kind, batch) if self.images and self.kind in images.WHOLE else batch

    def asserts_counts(self, counts: Mapping[str, int], model: Any) -> None:
        """Assert that every attention of the step ran once, or again in a recompute that keeps nothing of it."""
        if self.kind not in PLAIN:
            return
        each = len(self.data.masks) // self.sequences * model.config.num_hidden_layers
        checkpoint, more = self.options["checkpoint"], getattr(self, "between", "") == "evaluation"
        assert counts["attention_forwards"] == each * (1 + (checkpoint == "full") + more), counts
        assert counts["reused"] == each * (checkpoint in ("remat", "auto")), counts


def draw_data(dice: random.Random, seed: int, parts: int, batches: int, kind: str) -> Data:
    """Draw batches for a sequence that `parts` ranks share."""
    pack = dice.choice(["", "", "position_ids", "position_ids", "cu_seq_lens", "both", "tree"])
    if kind in PLAIN and not pack and dice.random() < 0.3:
        pack = "mask"
    padding = dice.choice(["", "", "right", "right"]) if not pack and kind in PLAIN else ""
    padding = "left" if padding and dice.random() < 0.1 else padding
    rows = dice.choice([1, 1, 2, 3])
    return Data(
        seed=seed, rows=rows, tokens=parts * dice.choice([2, 3, 5, 8, 13]) + dice.choice([0, 0, 1]), parts=parts,
        pack=pack, padding=padding, masks=tuple(dice.choice([*uneven.MASKS, "nothing"]) for _ in range(batches)),
    )  # fmt: skip


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

    return dice.choice([kind for kind in tiny.tried_here() if kind in ALONE and kind not in images.WHOLE]), {"heads": 4}


def made(kind: str, changes: Mapping[str, Any], seed: int, experts: str = "eager") -> Any:
    """Return the model in float64; a lower-case kind is a type of the sweep."""
    if kind.islower():
        return tiny.build(kind)
    return build(kind, seed, **{"experts_implementation": experts, **changes}).double()
