"""Refuse a transformers model that no test compared with one process: the lists of what was tried.

`make models` tries types of models, each with its types of layers. What a user sets on a listed type is checked here:
dropout, RoPE, layers that were copied, adapters.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.embedded_positions import local_ropes
from dfa_megatron.huggingface.join_outputs import classifies
from dfa_megatron.runtime.comm.groups import Group, resolve

TRIED: dict[str, set[str]] = {}
"""The types of layers of each type that was found exact, beside attention: `make models` writes its file."""

for _kind, _states in json.loads(Path(__file__).with_name("models.json").read_text("utf-8"))["types"].items():
    if _states["plain"] == "exact":
        TRIED.setdefault(_states.get("as", _kind), set()).update(_states.get("layers", ()))

CLASSES = {
    (
        "causal_conv1d_fn",
    ): "InklingShortConvolution Inkling2ShortConvolution Lfm2ShortConv Lfm2MoeShortConv Lfm3ShortConv",
    ("causal_conv1d_fn", "chunk_kimi_delta_attention"): "BailingHybridDeltaAttention KimiLinearDeltaAttention",
    ("causal_conv1d_fn", "mamba2_chunk_scan"): "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer "
    "NemotronHMamba2Mixer Zamba2MambaMixer",
    ("causal_conv1d_fn", "mamba_selective_scan"): "FalconMambaMixer JambaMambaMixer MambaMixer ZambaMambaMixer",
    ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"): "LaraMiniGatedDeltaNet OlmoHybridGatedDeltaNet "
    "Qwen3_5GatedDeltaNet Qwen3_5MoeGatedDeltaNet Qwen3NextGatedDeltaNet",
    ("update_indexer",): "AXK2Indexer DeepseekV32Indexer Dots3NoteTextIndexer GlmMoeDsaIndexer HYV4Indexer "
    "MistralLarge4TextIndexer",
}
"""The classes of layers with states, and of indexers, by the functions that each must call to be right."""

_INDEXERS = {*CLASSES["update_indexer",].split()}

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

_WITHOUT = {"linear_attention", "conv", "mlp", "moe"}
"""Types of layers without an attention."""


def is_multimodal(model: Any) -> bool:
    """Return whether a model has towers beside its language model, so that its configuration has one for the text."""
    return model.config.get_text_config() is not model.config


def kind_of(model: Any) -> str:
    """Return the type of a model for messages: "a llama model"."""
    return f"a {model.config.model_type} model"


def check_model(model: Any, *, unlisted: bool) -> list[torch.nn.Module]:
    """Return the attention layers of a transformers model that can be distributed.

    unlisted: the model need not be on the list.
    """
    names = {type(module).__name__ for module in model.modules()}
    if choosing := sorted(x for x in names - _INDEXERS if x.endswith(("Indexer", "Compressor"))):
        raise UnsupportedError(
            f"{kind_of(model)} with a {choosing[0]}",
            "it chooses blocks of keys, or compresses them, or chooses in another way than is known",
            "a model with such a choice, as those of types deepseek_v32, glm_moe_dsa and hy_v4",
        )
    decoder = model.get_decoder()
    within = decoder if is_multimodal(model) else model
    layers = [x for x in within.modules() if hasattr(x, "is_causal") and hasattr(x, "layer_idx")]
    if within is model and (encoding := [type(x).__name__ for x in layers if not x.is_causal]):
        what = f"attention that is not causal in a layer of type {encoding[0]}"
        raise UnsupportedError(what, "models are distributed with a causal mask", "causal self-attention in all layers")
    if strange := _unlisted(model):
        if not unlisted:
            raise UnsupportedError(
                f"{kind_of(model)} with {strange}",
                "no test compared that with one process",
                "unlisted=True, and then dfa_megatron.huggingface.prove(model), which compares it; or what "
                "docs/huggingface.md lists",
            )
        _warn(f"{kind_of(model)} with {strange}: compare it with one process, by dfa_megatron.huggingface.prove(model)")
    for name in patched(model):
        _warn(
            f"{name} is not of transformers itself, so it was never compared with one rank: what it computes from "
            "several tokens at once sees those of one rank alone. dfa_megatron.huggingface.prove(model) compares it"
        )
    _check_layers(model, decoder, layers)
    return layers


_warn = functools.cache(logging.getLogger(__name__).warning)


def _unlisted(model: Any) -> str:
    """Return what of a model is not on the list: its type, its class, types of layers or classes in it; or ""."""
    kind, name = model.config.model_type, type(model).__name__
    if kind not in TRIED:
        return f"a type, {kind}, that is not on the list"
    language = model.get_output_embeddings() is not None or name.endswith("ForCausalLM") or classifies(model)
    if model is not model.get_decoder() and ("DoubleHeads" in name or not language):
        return f"a class, {name}, whose head or loss may read several tokens"
    tried = TRIED[kind] or {"full_attention"}  # what configurations that list no types of layers have
    layers = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - tried
    if layers:
        return f"layers of type {', '.join(sorted(layers))}"
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    others = sorted(_named(cls) for cls in classes if not _is_of(cls, _CLASSES))
    return f"modules of {', '.join(others)}" if others else ""


def _check_layers(model: Any, decoder: Any, attentions: list[torch.nn.Module]) -> None:
    """Refuse dropout, and layers that were copied without their config or embed positions by a batch's longest one."""
    config, kind = model.config.get_text_config(), kind_of(model)
    if dropout := getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0):
        raise UnsupportedError(
            f"{kind} with attention dropout {dropout}", "the block kernels have no dropout", "attention_dropout=0.0"
        )
    types, whole = getattr(config, "layer_types", None), getattr(config, "num_hidden_layers", 0)
    layers: int = whole if types is None else sum(kind not in _WITHOUT for kind in types)
    held = max((list(x) for x in decoder.children() if isinstance(x, torch.nn.ModuleList)), key=len, default=[])
    if len(attentions) != layers:
        raise UnsupportedError(
            f"{kind} with {len(attentions)} attentions in {len(held)} layers, {len({*held})} of them different, whose "
            f"config names {whole} layers, {layers} of them with attention",
            "layers are compared with its config, one by one",
            "a copy.deepcopy of each layer, and num_hidden_layers, with layer_types, of the config",
        )
    inside = {*decoder.modules()} - {*decoder.children()}
    if ropes := {rope for rotary in inside for rope in local_ropes(rotary)}:
        raise UnsupportedError(
            f"{kind} with rope_type={', '.join(sorted(ropes))}",
            "its frequencies depend on the longest position in the batch, and its layers embed positions themselves",
            "rope_type 'default', 'linear', 'yarn' or 'llama3'",
        )


def patched(model: torch.nn.Module) -> list[str]:
    """Return the forwards and hooks of a model's modules that are not of transformers, by name, sorted."""
    found = set()
    for module in model.modules():
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        listed = all(_is_of(cls, _CLASSES) for cls in type(module).__mro__)
        for function in (module.forward, *hooks) if listed else hooks:
            code = inspect.unwrap(getattr(function, "func", function))
            if not _is_of(code, (*_COMPARED, *_WRAPPING)):
                found.add(_named(code if hasattr(code, "__qualname__") else type(code)))
    return sorted(found)


_COMPARED = ("transformers", "torch", "dfa_megatron", "peft.tuners", "peft.utils")
"""Packages whose code is known; of PEFT's what `check_adapters` lets pass."""
_CLASSES = (*_COMPARED, "builtins", "abc", "typing", "collections")
"""Packages of the classes that modules may have, and their bases."""
_WRAPPING = ("accelerate", "deepspeed", "peft")
"""Packages whose functions run a module's own forward."""


def _is_of(code: Any, packages: tuple[str, ...]) -> bool:
    """Return whether a class or a function is defined in one of these packages."""
    return f"{code.__module__}.".startswith(tuple(f"{name}." for name in packages))


def _named(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def check_adapters(model: Any) -> None:
    """Refuse PEFT's adapters that may depend on the tokens of a whole sequence."""
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


_JOINED = "_is_fsdp_managed_module"
"""The mark of PyTorch's FSDP on a module."""


def check_parts(model: torch.nn.Module, group: Group) -> None:
    """Refuse tensor parallelism between ranks of a group, whose tokens differ, and of a model with indexers.

    FSDP's parts, the first of a parameter, are joined before they multiply. Experts' parts are sent their tokens.
    """
    if (own := resolve(group)) is None:
        return
    from torch.distributed.tensor import DTensor

    ranks = {*dist.get_process_group_ranks(own)}
    indexers = sorted({type(module).__name__ for module in model.modules()} & _INDEXERS)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding) or not isinstance(weight, DTensor):
            continue
        cut = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
        for dim in cut[hasattr(module, _JOINED) :]:
            holders = dist.get_process_group_ranks(weight.device_mesh.get_group(dim))
            if len(ranks.intersection(holders)) > 1:
                raise UnsupportedError(
                    f"tensor parallelism of ranks {holders}, which hold parts of {name}, in a group of {sorted(ranks)}",
                    "the ranks of a group hold different tokens, and parts multiply the same ones",
                    'init_device_mesh("cuda", (dp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))["cp"] as the group',
                )
            if indexers and len(holders) > 1:
                raise UnsupportedError(
                    f"tensor parallelism of a model with a {indexers[0]}",
                    "the gradients of its latents would be of one rank's heads",
                    "DistributedConfig(fsdp_size=, ep_size=)",
                )
