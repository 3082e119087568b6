"""Named draws: models, batches and ranks that must come to what one process comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any
from zlib import crc32

import torch

from dfa_megatron import masks
from dfa_megatron.masks import Mask, Span, Tile
from tests.fuzz.frameworks.language_models import EXPERTS, MIXED, OPTIONS, Data
from tests.fuzz.frameworks.transformers_step import WAYS, TransformersDraw
from tests.support.models import VOCABULARY

Shape = tuple[str, dict[str, Any]]

LLAMA: Shape = ("Llama", {})
MODELS: dict[str, Shape] = {
    "llama-one-kv-head-of-three": ("Llama", {"heads": 3, "kv_heads": 1}),
    "llama-window-left-over-in-the-config": ("Llama", {"sliding_window": 5}),
    "llama-yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "mistral-window-longer-than-a-ranks-part": ("Mistral", {"sliding_window": 15}),
    "mistral-window-longer-than-the-text": ("Mistral", {"sliding_window": 64}),
    "qwen2-window-in-one-layer": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma2-window-in-one-layer": ("Gemma2", {"attn_logit_softcapping": None, "sliding_window": 5}),
    "gemma2-capped-scores": ("Gemma2", {"attn_logit_softcapping": 3.0, "sliding_window": 5}),
    "gpt-oss-sinks": ("GptOss", {**EXPERTS, "sliding_window": 64}),
    "gpt-oss-sinks-window-in-one-layer": ("GptOss", {**EXPERTS, "sliding_window": 5}),
    "gemma3-window-in-one-layer": ("Gemma3Text", {"sliding_window": 5, "layer_types": MIXED}),
    "qwen2-moe-window-in-one-layer": ("Qwen2Moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED,
    }),
    "phimoe-window": ("Phimoe", {**EXPERTS, "sliding_window": 9, "router_jitter_noise": 0.0}),
    "phi3-window": ("Phi3", {"sliding_window": 9}),
}  # fmt: skip
GEMMA4: Shape = ("Gemma4Text", {
    "num_hidden_layers": 4, "layer_types": MIXED * 2, "num_kv_shared_layers": 2, "sliding_window": 5,
    "global_head_dim": 8, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
})  # fmt: skip
"""Whose later layers share the keys of earlier ones, with windows in half of all."""
LLAMA4: Shape = ("Llama4Text", {
    **EXPERTS, "intermediate_size_mlp": 24, "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 7, "no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 4,
    "attn_scale": 0.5,
})  # fmt: skip
NEWER = {"gemma4": GEMMA4, "llama4-chunks-and-temperature": LLAMA4}
"""Of types that older releases of transformers do not have."""

LIMIT = 10
"""Tokens up to which the tables and frequencies of these models reach."""
_ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": LIMIT}
_LONGROPE = _ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 5.0]}
OF_LENGTH: dict[str, Shape] = {
    "llama-dynamic": ("Llama", {
        "max_position_embeddings": LIMIT, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    }),
    "phi3-longrope": ("Phi3", {
        "max_position_embeddings": 64, "rope_parameters": _LONGROPE, "original_max_position_embeddings": LIMIT,
    }),
}  # fmt: skip
"""Whose RoPE depends on the length of the longest sequence; no rank's part reaches the length at which it changes."""
_PLAIN = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
TABLE: Shape = ("GPTBigCode", {**_PLAIN, "max_position_embeddings": LIMIT})
ROUTED = {"router_aux_loss_coef": 0.7, "output_router_logits": True, "num_experts": 4, **EXPERTS}
"""Models whose routers have a loss."""


STATES = ("jamba", "kimi_linear", "lfm2")
"""Types with convolutions and recurrences, which may reach over ranks of a token."""


_ALIKE = defaultdict[int, Iterator[int]](count)
"""Numbers rows of one name: a run tells its rows apart by their numbers."""


def row(name: str, shape: Shape, size: int, tokens: int, draw: Any = TransformersDraw, **more: Any) -> Any:
    """Return a draw; `more` are its fields, those of its data, and options of `TrainingConfig`.

    Its number, from which its data and weights follow, is that of its name: rows of other names change nothing.
    """
    own = {key: more.pop(key) for key in [*more] if key in draw.__dataclass_fields__}
    data = {key: more.pop(key) for key in [*more] if key in Data.__dataclass_fields__}
    kind, model = shape
    same = crc32(f"{name}, {kind}, {size}, {tokens}".encode()) % 10_000
    number = own.pop("number", 100 * same + next(_ALIKE[same]))
    return draw(
        number=number, name=f"{name}, {size} ranks", size=size, kind=kind, model=model,
        data=Data(**{"seed": number, "rows": 1, "tokens": tokens, "parts": size, **data}), options=OPTIONS | more,
        **own,
    )  # fmt: skip


def whole() -> list[Any]:
    """Return rows of sequences that no rank divides: windows, caps, sinks, experts, RoPE of other lengths."""
    some: dict[str, Any] = {"rows": 2, "masks": ("a rank of prompt",)}
    balanced = some | {"loss": "function", "schedule": "balanced"}
    kept: dict[str, Any] = {"checkpoint": "full", "as_kept": True}
    longest = OF_LENGTH | {"table": TABLE}
    any_length: dict[str, Any] = {"rows": 2, "checkpoint": "remat", "near": 1e-6}
    return [
        *(row(name, shape, 2, 23, **some) for name, shape in MODELS.items()),
        *(row(name, shape, 3, 35, loss="function", **some) for name, shape in NEWER.items()),
        *(row(name, shape, 3, 35, **balanced) for name, shape in MODELS.items() if "window" not in name),
        row("more ranks than heads", MODELS["llama-one-kv-head-of-three"], 4, 47, schedule="balanced_shared", **some),
        row("a group of one rank", MODELS["llama-yarn"], 1, 11, sequences=2, masks=("holes",) * 2),
        *(row("any length", LLAMA, size, tokens, **any_length) for size in (3, 5) for tokens in (5, 13)),
        *(row(f"any length, {kind}", (kind, {}), 5, 7, rows=2) for kind in STATES),
        *(row(name, shape, 3, tokens, rows=2) for name, shape in longest.items() for tokens in (LIMIT - 1, LIMIT)),
        *(row(name, shape, 3, 35, **some) for name, shape in OF_LENGTH.items()),
        row("padded", ("Qwen2", {}), 2, 16, rows=4, padding="right"),
        row("checkpointed", MODELS["qwen2-moe-window-in-one-layer"], 2, 12, **kept, reentrant=True),
        row("shared keys, checkpointed", GEMMA4, 2, 12, **kept),
        row("no label", LLAMA, 4, 12, masks=("nothing",)),
        row("labels of groups", LLAMA, 2, 12, sequences=2, loss="function", masks=("prompts", "holes")),
    ]


def packs() -> list[Any]:
    """Return rows of documents, told in every way."""
    ways, longest = ("position_ids", "cu_seq_lens", "both"), OF_LENGTH | {"table": TABLE}
    counted = {name: shape for name, shape in MODELS.items() if "longer" not in name and "left-over" not in name}
    some = {name: MODELS[name] for name in ("llama-yarn", "gemma3-window-in-one-layer")} | NEWER
    at = {"pack": "position_ids", "starts": (0, 4), "rows": 2}
    return [
        *(row(name, shape, 2, 23, pack=ways[number % 3]) for number, (name, shape) in enumerate(counted.items())),
        *(row(name, shape, 3, 35, rows=2, pack=ways[number % 3]) for number, (name, shape) in enumerate(some.items())),
        *(row(name, shape, 3, 14, **at) for name, shape in longest.items()),  # the last document is the longest
        row("documents that end between ranks", LLAMA, 2, 24, pack="position_ids", starts=(0, 12)),
        row("a group of one rank", MODELS["llama-yarn"], 1, 11, sequences=2, rows=2, pack="both", masks=("holes",) * 2),
    ]


NEAR = ("mistral-window", "gemma2-capped-scores", "gpt-oss-sinks-window-in-one-layer")
"""Models that count places: distances along the path, and with those of `NEWER` chunks of it."""


def trees() -> list[Any]:
    """Return rows of segments that share prefixes."""
    near, some = {name: MODELS[name] for name in NEAR} | NEWER, {"tokens": 35, "pack": "tree"}
    return [
        row("two ranks", ("Qwen3", {}), 2, 23, pack="tree"),
        *(row(kept, ("Qwen3", {}), 3, checkpoint=kept, near=2e-6, **some) for kept in FORMS),
        *(row(name, shape, 3, **some) for name, shape in near.items()),
    ]


FORMS = ("none", "full", "remat")


def two_streams(half: int, block: int) -> Mask:
    """Block diffusion: noisy blocks see themselves and the clean blocks before; clean ones are causal by blocks."""
    tiles = list[Tile]()
    for lo in range(0, half, block):
        hi = min(lo + block, half)
        noisy, before, clean = Span(lo, hi), Span(half, half + lo), Span(half + lo, half + hi)
        tiles += [Tile(noisy, noisy), Tile(noisy, before), Tile(clean, Span(half, half + hi))]
    return masks.union(f"two streams {block}", 2 * half, tiles)


def masked() -> list[Any]:
    """Return rows of any mask: windows count positions, experts count packed tokens."""
    length = 38  # of three ranks
    streams, lengths = torch.arange(length) % (length // 2), [7, length - 7]
    path = torch.cat((torch.arange(12), torch.arange(4, length - 8)))
    documents = torch.cat([torch.arange(each) for each in lengths])
    cases: list[tuple[str, Shape, Mask, torch.Tensor | None]] = [
        ("streams", ("Qwen3", {}), two_streams(length // 2, 4), streams),
        ("streams in windows", MODELS["gemma2-capped-scores"], two_streams(length // 2, 3), streams),
        ("blocks of documents", MODELS["mistral-window"], masks.block_causal_documents(lengths, 4), documents),
        ("a prefix", MODELS["gemma2-capped-scores"], masks.prefix_lm(length, length // 2), None),
        ("routers", ("Mixtral", ROUTED), masks.prompt_tree([4, 8, length - 12], [-1, 0, 0]), path),
    ]
    found = [row("any mask", LLAMA, size, 12 * size + 2, pack="mask") for size in (2, 2, 3, 3)]
    for name, shape, mask, places in cases:
        told = {"mask": mask} | ({} if places is None else {"position_ids": places[None]})
        found.append(row(name, shape, 3, length, masks=("all",), told=told))
    return found


def routed() -> list[Any]:
    """Return rows whose loss has that of routers, with padding and at lengths that ranks do not divide."""
    found = []
    for kind, size, checkpoint in (("Mixtral", 3, "none"), ("Qwen3Moe", 2, "remat")):
        some: dict[str, Any] = {"rows": 2, "checkpoint": checkpoint, "near": 1e-6}
        found += [
            row("routers", (kind, ROUTED), size, 9 * size, **some),
            row("routers, padded", (kind, ROUTED), size, 9 * size - 1, padding="right", **some),
        ]
    return found


def typed() -> list[Any]:
    """Return rows whose tokens have types, and of models of several parts that are given text alone."""
    types, zeros = torch.arange(34).view(2, 17) % 3, torch.zeros(2, 17, dtype=torch.long)
    axes = torch.cat((torch.arange(9), torch.arange(4), torch.arange(7))).expand(4, 1, 20)
    alone: dict[str, Any] = {"images": False, "tokens": 20, "starts": (0, 9, 13)}
    ways: tuple[dict[str, Any], ...] = (
        {"pack": "position_ids"},
        {"told": {"position_ids": axes}},
        {"pack": "cu_seq_lens"},
        {"pack": "tree", "parents": (-1, 0, 0)},
    )
    both: dict[str, Any] = {"tokens": 17, "rows": 2, "images": False}
    found = [
        row("types", ("gpt2", {}), 3, **both, told={"token_type_ids": types}),
        row("types, packed", ("gpt2", {}), 3, **both, told={"token_type_ids": types}, pack="position_ids"),
        row("text alone", ("gemma3", {}), 3, **both, told={"token_type_ids": zeros}),
        row("text alone", ("qwen3_vl", {}), 2, **both, padding="right"),
    ]
    for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5 with images"):
        found += [row("text alone", (kind, {}), 2 + at % 2, **alone, **way) for at, way in enumerate(ways)]
    return found


def grown() -> list[Any]:
    """Return rows of models whose layers were copied, added or replaced, in every way."""
    found = []
    for at in range(2 * WAYS):
        size, more = 2 + (at // 2 + at // WAYS) % 2, {"grown": ("before", "after")[at % 2], "checkpoint": FORMS[at % 3]}
        more |= {"number": at, "pack": ("", "both")[at // WAYS]}
        found.append(row(f"grown {more['grown']}", LLAMA, size, 4 * size + 5, **more))
    return found


WINDOWS: dict[str, Shape] = {
    "llama": LLAMA,
    "mistral": ("Mistral", {"sliding_window": 5}),
    "gemma3": ("Gemma3Text", {"sliding_window": 5, "layer_types": MIXED}),
}


def interrupted() -> list[Any]:
    """Return rows of forwards whose backwards come after anything else, packed and not; one type in every way."""
    ways = [(kept, reentrant) for kept in (*FORMS[1:], "auto") for reentrant in (False, True)]
    some: dict[str, Any] = {"rows": 2, "between": "anything", "as_kept": True}
    return [
        row(name, shape, 3, 18, checkpoint=kept, reentrant=reentrant, pack=("", "both")[(at + number) % 2], **some)
        for number, (name, shape) in enumerate(WINDOWS.items())
        for at, (kept, reentrant) in enumerate(ways[number - 1 :: 3] if number else ways)
    ]


DOCUMENTS = (0, 1, 9, 23)
"""Where packed documents begin: one of a single token, one that reaches over two ranks."""
TREE = (0, 9, 10, 12, 26, 27, 33), (-1, 0, 1, 2, 1, 0, -1)
"""Where segments of a tree begin, and their parents; a single token and its parent and child are on three of them."""


def of_type(kind: str, section: str, size: int, **more: Any) -> Any:
    """Return a draw of a type of the sweep: "plain", "packed", "tree", or rematerialized, "remat"."""
    how: dict[str, dict[str, Any]] = {
        "plain": {"rows": 2},
        "packed": {"pack": "position_ids", "starts": DOCUMENTS},
        "tree": {"pack": "tree", "starts": TREE[0], "parents": TREE[1]},
        "remat": {"pack": "position_ids", "starts": DOCUMENTS, "checkpoint": "remat", "as_kept": True},
    }
    more |= how[section] | {"masks": ("a rank of prompt",)}
    return row(f"{kind} {section}", (kind, {}), size, 20 * size - 1, **more)
