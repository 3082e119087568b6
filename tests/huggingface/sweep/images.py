"""Build tiny models of several parts, and batches with images of four tokens anywhere, across ranks too."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.loss.scores import IGNORED
from tests.support.models import with_noise

TOKEN, TOKENS = 90, 4
"""The id of an image's tokens, and how many an image has."""
PLACES = ((3, 17, 34), (12,))
"""Where images begin, by row: the second reaches over the first two ranks."""

_TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
_TOWER = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_GRID = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
_DEEP = {**_GRID, "intermediate_size": 24, "num_position_embeddings": 16}
_IDS = {"image_token_id": TOKEN, "video_token_id": 91, "vision_start_token_id": 88, "vision_end_token_id": 89}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
"""Of layers with gated delta nets."""
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
_LATENT = {
    "num_hidden_layers": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "index_topk": 8, "index_head_dim": 24, "index_n_heads": 4, "no_rope_layers": [1, 0, 1, 0],
    "indexer_types": ["full", "shared", "full", "shared"], "kv_source_layers": [0, 1, 0, 1], "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_LATER = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
_GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}

_GEMMA4 = {**_GEMMA, "global_head_dim": 8, "num_global_key_value_heads": 2}
_SOUND = {"video_token_id": 91, "audio_token_id": 92}


def _whole(
    name: str, form: str, text: dict[str, Any], tower: dict[str, Any] | None, **more: Any
) -> tuple[str, str, dict[str, Any]]:
    """Return the name of a type's classes, the form of its images, and its configuration."""
    vision = {} if tower is None else {"vision_config": tower}
    return name, form, {"text_config": {**_TEXT, **text}, **vision, **more}


WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": _whole(
        *("Gemma3", "image", _GEMMA, {**_TOWER, "image_size": 8, "patch_size": 2}),
        mm_tokens_per_image=TOKENS, image_token_index=TOKEN,
    ),
    "gemma4": _whole(
        *("Gemma4", "patches"),
        {
            **_GEMMA4, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        },
        {
            **_TOWER, "head_dim": 16, "num_key_value_heads": 2, "patch_size": 2, "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        image_token_id=TOKEN, **_SOUND,
    ),
    "gemma4_unified": _whole(
        *("Gemma4Unified", "merged patches", _GEMMA4),
        {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 16},
        audio_config={"audio_embed_dim": 8}, image_token_id=TOKEN, **_SOUND,
    ),
    "fuyu": _whole("Fuyu", "pieces", {"model_type": "persimmon"}, None, patch_size=2, image_token_id=TOKEN),
    "got_ocr2": _whole(
        *("GotOcr2", "large picture", {**_LATER, "model_type": "qwen2"}),
        {
            **_TOWER, "image_size": 16, "patch_size": 2, "mlp_dim": 24, "output_channels": 8, "window_size": 0,
            "global_attn_indexes": [0],
        },
        image_token_index=TOKEN,
    ),
    "llava": _whole(
        *("Llava", "picture", {"model_type": "llama"}),
        {**_TOWER, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
        image_token_index=TOKEN, vision_feature_layer=-1,
    ),
    "mistral_large4": _whole(
        *("MistralLarge4", "sized picture", _LATENT),
        {**_TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 8, "patch_size": 2},
        image_token_index=TOKEN, spatial_merge_size=2, vision_feature_layer=-1,
    ),
    "qwen2_vl": _whole("Qwen2VL", "grid", {**_AXES, **_LATER}, {**_GRID, "embed_dim": 16, "mlp_ratio": 1}, **_IDS),
    "qwen2_5_vl": _whole(
        *("Qwen2_5_VL", "grid", {**_AXES, **_LATER}),
        {**_GRID, "intermediate_size": 24, "window_size": 8, "fullatt_block_indexes": [1]},
        **_IDS,
    ),
    "qwen3_vl": _whole("Qwen3VL", "grid", _AXES, {**_DEEP, "deepstack_visual_indexes": [0, 1]}, **_IDS),
    "qwen3_vl_moe": _whole(
        "Qwen3VLMoe", "grid", {**_AXES, **_MOE}, {**_DEEP, "deepstack_visual_indexes": [0]}, **_IDS
    ),
    "qwen3_5 with images": _whole(
        *("Qwen3_5", "grid", {**_AXES, **DELTA, "layer_types": ["linear_attention", "full_attention"]}, _DEEP), **_IDS
    ),
}  # fmt: skip
"""Every type with images."""


SIZES = {"picture": (3, 8, 8), "large picture": (3, 16, 16), "pieces": (4, 3 * 2 * 2)}
"""Of images that come without marks."""


def build(kind: str) -> Any:
    """Return the model in float64, in training mode."""
    import transformers

    name, _, values = WHOLE[kind]
    config = getattr(transformers, f"{name}Config")(**values)
    config.text_config.pad_token_id = 0
    torch.manual_seed(7)
    made = getattr(transformers, f"{name}ForConditionalGeneration", None) or getattr(transformers, f"{name}ForCausalLM")
    model = made._from_config(config, **EAGER)
    return with_noise(model).double().train()


def add_images(model: Any, kind: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with images in it, and for packed documents the positions that the model needs."""
    ids, labels = batch["input_ids"].clone() % 80, batch["labels"].clone()
    rows = [(row, at) for row, places in zip(range(len(ids)), PLACES, strict=False) for at in places]
    for row, at in rows:
        ids[row, at : at + TOKENS], labels[row, at : at + TOKENS] = TOKEN, IGNORED
    form, marks = WHOLE[kind][1], (ids == TOKEN).int()
    found = {"input_ids": ids, "labels": labels, **_pixels(form, len(rows), marks)}
    if (places := batch.get("position_ids")) is None:
        return found
    if "image_grid_thw" not in found:
        return found | {"position_ids": places}
    starts = [*(places[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
    axes = [_axes(model, part(found, lo, hi)) for lo, hi in pairwise(starts)]
    return found | {"position_ids": torch.cat((places[None], torch.cat(axes, 2)))}


def part(batch: dict[str, torch.Tensor], lo: int, hi: int) -> dict[str, torch.Tensor]:
    """Return a document of the only row with its images."""
    before, inside = ((batch["input_ids"][:, slice(*x)] == TOKEN).sum() // TOKENS for x in ((0, lo), (lo, hi)))
    images = len(PLACES[0])
    cut = {}
    for name, x in batch.items():
        if x.shape[:1] == batch["input_ids"].shape[:1]:
            cut[name] = x[:, lo:hi]
        elif inside:
            each = len(x) // images
            cut[name] = x[before * each : (before + inside) * each]
    return cut


def _axes(model: Any, document: dict[str, torch.Tensor]) -> torch.Tensor:
    if "image_grid_thw" not in document:
        length = document["input_ids"].shape[1]
        return torch.arange(length).expand(3, 1, length)
    given = {name: document[name] for name in ("input_ids", "mm_token_type_ids", "image_grid_thw")}
    axes: torch.Tensor = model.model.get_rope_index(**given)[0]
    return axes


def _pixels(form: str, images: int, marks: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return random images as a type's processor would bring them."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if form in SIZES:
        return {"pixel_values": random(images, *SIZES[form])}
    if form == "sized picture":
        return {"pixel_values": random(images, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]]).expand(images, 2)}
    if form == "image":
        return {"pixel_values": random(images, 3, 8, 8), "token_type_ids": marks}
    if form.endswith("patches"):
        side = 4 if form == "patches" else 2
        corners = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        places = corners.expand(images, side**2, 2).contiguous()
        pixels = random(images, side**2, 3 * 2 * 2)
        return {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": marks}
    grid = torch.tensor([[1, 4, 4]]).expand(images, 3).contiguous()
    return {"pixel_values": random(images * 16, 3 * 2 * 4 * 4), "image_grid_thw": grid, "mm_token_type_ids": marks}
