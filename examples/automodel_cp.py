"""NVIDIA NeMo Automodel: our attention in place of the context parallelism that a model brings, for six of its models.

    mesh = device_mesh["cp"]
    distribute(model, mesh)                                    # once
    sharder = ContextParallelSharder(model, device_mesh, batch)  # as Automodel's recipes do for every batch
    context, batch = sharder.shard(batch)

The recipe stays: it averages gradients and counts labels as ever. `MIXERS` lists what is replaced, on the layers of this
model. Written for nemo-automodel 0.7.0, whose layers it knows by name; .ci/automodel.sh compares with one process.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dfa_megatron import TrainingConfig, dist_flash_attn_func, dist_flash_attn_varlen_func
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import replace as replace_name
from dfa_megatron.indexed import index_topk, sparse_attn
from dfa_megatron.recurrence import dist_conv, dist_scan, fla_scan

NAME = "dfa_automodel"
"""Our attention and its masks in transformers' registers, and our attribute of a layer."""


@dataclass
class Sharing:
    """The ranks of a sequence, and the batch that they share now.

    documents: global offsets of each row's documents, the same on every rank; None where each row is one.
    Kimi's layers get it as their mesh, their packed context and their document ids, which only our functions read.
    """

    group: Any
    config: TrainingConfig
    documents: tuple[tuple[int, ...], ...] | None = None
    cp_enabled = True
    seq_start = 0

    @property
    def where(self) -> dict[str, Any]:
        return {"group": self.group, "config": self.config, "cu_seqlens": self.documents}

    def row(self, row: int) -> Sharing:
        return self if self.documents is None else replace(self, documents=self.documents[row : row + 1])

    def get_group(self) -> Sharing:
        return self

    @property
    def doc_ids(self) -> Sharing:
        return self

    local_doc_ids = doc_ids


def distribute(model: torch.nn.Module, mesh: DeviceMesh, config: TrainingConfig | None = None) -> torch.nn.Module:
    """Give a model of Automodel our attention over the ranks of `mesh`, device_mesh["cp"], and our cut of its batches.

    model: with backend.attn="sdpa". It may be sharded already. Batches have text alone.
    """
    from nemo_automodel.components.distributed.context_parallel import sharder

    if mesh.size() == 1:
        return model
    asked, backend = f"Automodel's {type(model).__name__}", getattr(getattr(model, "backend", None), "attn", "sdpa")
    if backend != "sdpa":
        raise UnsupportedError(f"{asked} with backend.attn={backend!r}", "ours stands in for sdpa", 'attn="sdpa"')
    if getattr(model, "mtp", None) is not None:
        raise UnsupportedError(f"{asked} with MTP", "its tokens are shifted within a rank", "a model without")
    sharing = Sharing(mesh.get_group(), TrainingConfig.of(config))
    mixers = [(module, how) for module in model.modules() if (how := how_of(module)) is not None]
    if not mixers:
        raise UnsupportedError(asked, "none of its layers is known", f"a model with {', '.join(MIXERS)}")
    for module, how in mixers:
        how(module, sharing)
    for module in model.modules():  # their own way, if the recipe has set it up
        if getattr(module, "_cp_enabled", False):
            module._cp_enabled = False
    model.cp_mesh = None
    given = functools.partial(shard, sharing, model)
    way = {"shard_batch": given, "local_token_global_indices": sharder.contiguous_local_indices}
    model.prepare_model_inputs_for_cp = lambda batch, **_: {"cp_sharder": sharder.ContextParallelSharder(**way)}
    return model


def how_of(module: torch.nn.Module) -> Any:
    """Return what gives a layer our functions; FSDP2 puts a class of its own before a layer's."""
    return next((MIXERS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in MIXERS), None)


# The batch.


def shard(sharing: Sharing, model: Any, mesh: Any, tp_mesh: Any, batch: dict[str, Any], **options: Any) -> Any:
    """Keep this rank's part of a batch, by Automodel's own contiguous cut, and remember the documents of all ranks."""
    from nemo_automodel.components.distributed.context_parallel import sharder

    if media := sorted(key for key in batch if key.startswith(MEDIA)):
        raise UnsupportedError(f"a batch with {', '.join(media)}", "its text is cut before images join", "text alone")
    length = batch["input_ids"].shape[1]
    ids = ids_of(batch, length)
    for key in PACKED:
        batch.pop(key, None)
    if ids is not None:
        batch.setdefault("padding_mask", ids == 0)
    context, batch, layout = sharder.shard_batch_contiguous(mesh, tp_mesh, batch, **options)
    sharing.documents = None if ids is None else offsets_of(ids, layout.padded_seq_len)
    batch.setdefault("padding_mask", padded(batch, mesh, layout))
    batch |= MORE[kind](sharing) if (kind := type(model.config).__name__) in MORE else {}
    return context, batch, layout


MEDIA = ("pixel_values", "image", "video", "audio", "input_features", "mm_token_type_ids")
PACKED = (
    "_packed_seq_ids", "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "packed_token_indices",
    "qkv_format", "seq_lens", "seq_lens_padded",
)  # fmt: skip


def ids_of(batch: dict[str, Any], length: int) -> torch.Tensor | None:
    """Return the document of each token (batch, length), from 1 on, 0 for padding; None if each row is one document."""
    mask = batch.get("_packed_seq_ids", batch.get("attention_mask"))
    lengths = batch.get("seq_lens_padded", batch.get("seq_lens"))
    if mask is not None and mask.dim() == 2:
        return mask
    if mask is not None or (lengths is None and batch.get("cu_seqlens") is not None):
        what = "a mask of four dimensions" if mask is not None else "cu_seqlens without seq_lens"
        raise UnsupportedError(what, "where documents begin is not told", "packing with document ids or seq_lens")
    if lengths is None:
        return None
    at = torch.arange(length, device=lengths.device)
    ends = lengths.clamp(min=0).cumsum(1)  # unused places are below 0
    return ((at[None, :, None] >= ends[:, None]).sum(2) + 1).masked_fill(at >= ends[:, -1:], 0)


def offsets_of(ids: torch.Tensor, length: int) -> tuple[tuple[int, ...], ...]:
    """Return the offsets of each row's documents; padding, and what the cut adds, are documents of their own."""
    rows = []
    for row in ids.cpu():
        starts = (1 + torch.nonzero(row[1:] != row[:-1]).flatten()).tolist()
        rows.append(tuple(dict.fromkeys((0, *starts, len(row), length))))
    return tuple(rows)


def padded(batch: dict[str, Any], mesh: Any, layout: Any) -> torch.Tensor:
    """Return the mask of the tokens that the cut has added to rows of one document."""
    tokens = batch["input_ids"]
    first = mesh.get_local_rank() * tokens.shape[1]
    places = torch.arange(first, first + tokens.shape[1], device=tokens.device)
    return (places >= layout.original_seq_len).expand(tokens.shape)


def _mimo_masks(sharing: Sharing) -> dict[str, Any]:
    """Return masks in place of those of (tokens, tokens) that the model would make, and that nobody reads."""
    nothing = torch.zeros(1, 1, 1, 1)
    return {"attention_mask": {"full_attention": nothing, "sliding_attention": nothing}}


def _kimi_context(sharing: Sharing) -> dict[str, Any]:
    return {"kimi_packed_context": replace(sharing)}


MORE: dict[str, Any] = {
    "KimiK3TextConfig": _kimi_context,
    "KimiLinear48BConfig": _kimi_context,
    "MiMoV2FlashConfig": _mimo_masks,
}
"""What the batch of a model gets beside its parts, by the class of its configuration."""


# Attention. Layers hand over (batch, heads, tokens, head_dim), and ours takes (batch, tokens, heads, head_dim).


def attend(sharing: Sharing, qkv: Any, scale: float | None, window: int | None = None, **more: Any) -> torch.Tensor:
    """Return attention (batch, tokens, heads, head_dim_v) over the ranks, causal, in each document.

    window: tokens that a token sees, itself among them; None for all.
    """
    q, k, v = (x.transpose(1, 2) for x in qkv)
    call = sharing.where | {"softmax_scale": scale, "window_size": (window - 1, 0) if window else (-1, -1), **more}
    if (documents := call.pop("cu_seqlens")) is None:
        return dist_flash_attn_func(q, k, v, causal=True, **call)
    return dist_flash_attn_varlen_func(q, k, v, documents, causal=True, **call)


def function(layer: Any, sharing: Sharing) -> None:
    """Put ours where a layer holds its function, as Qwen3.5's do."""
    scale = layer.scaling

    def attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        return attend(sharing, (q, k, v), scale).transpose(1, 2)

    layer.attn_func = attn_func


def in_transformers(layer: Any, sharing: Sharing) -> None:
    """Register ours for layers of transformers, as Gemma 4's are; towers keep theirs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **given: Any) -> Any:
        if given.get("dropout") or given.get("softcap"):
            raise UnsupportedError("dropout or a softcap in Gemma 4", "it has neither", "attention_dropout=0.0")
        return attend(vars(layer)[NAME], (q, k, v), scaling, given.get("sliding_window")), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    vars(layer)[NAME] = sharing
    layer.config._attn_implementation = NAME


def in_file(layer: Any, sharing: Sharing) -> None:
    """Replace what MiMo's layers call in their file, for layers that have a `Sharing`."""

    def replacing(own: Any) -> Any:
        def eager(layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0) -> Any:
            if (its := vars(layer).get(NAME)) is None:
                return own(layer, q, k, v, mask, scaling, dropout)
            if dropout:
                raise UnsupportedError("attention dropout", "the block kernels have none", "attention_dropout=0.0")
            return attend(its, (q, k, v), scaling, layer.sliding_window, sinks=layer.attention_sink_bias), None

        return eager

    vars(layer)[NAME] = sharing
    replace_name(sys.modules[_class_of(layer).__module__], "_eager_attention_forward", replacing)


def _class_of(layer: Any) -> type:
    return next(cls for cls in type(layer).__mro__ if cls.__name__ in MIXERS)


# Kimi: its own layers for context parallelism run, whose messages and kernels ours replace.


def kimi(layer: Any, sharing: Sharing) -> None:
    """Replace what the layers of Kimi Linear and K3 call in their file when they are given a `Sharing`."""
    layer._cp_mesh = sharing
    module = sys.modules[_class_of(layer).__module__]
    for name, ours in KIMI.items():
        replace_name(module, name, functools.partial(_given, ours))
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        if (conv := getattr(layer, name, None)) is not None:
            conv.forward = functools.partial(_convolve, conv.forward, layer.conv_size)


def _given(ours: Any, own: Any) -> Any:
    """Return a function that calls ours if a `Sharing` is among the arguments, and Automodel's otherwise."""

    def either(*args: Any, **kwargs: Any) -> Any:
        ran = any(isinstance(x, Sharing) for x in (*args, *kwargs.values()))
        return ours(own, *args, **kwargs) if ran else own(*args, **kwargs)

    return either


def _of_documents(own: Any, q: Any, k: Any, v: Any, *, q_doc_ids: Sharing, scale: float, **_: Any) -> torch.Tensor:
    return attend(q_doc_ids, (q, k, v), scale).transpose(1, 2)


def _kda(own: Any, *, cp_context: Sharing, **given: Any) -> Any:
    tokens = {name: given.pop(name) for name in ("q", "k", "v", "g", "beta")}
    options = {name: given[name] for name in ("use_qk_l2norm_in_kernel", "safe_gate") if name in given}
    return dist_scan(fla_scan(own, **options), tokens, **cp_context.where)


def _convolve(own: Any, width: int, x: torch.Tensor, cp_context: Sharing | None = None, **given: Any) -> Any:
    if cp_context is None:
        return own(x=x, **given)
    return dist_conv(lambda x, _: own(x=x, **given)[0], x, width, **cp_context.where), None


KIMI = {
    "all_gather_sequence": lambda own, x, group, dim: x,
    "build_fla_cp_context": lambda own, context, row, group, width: context.row(row),
    "chunk_kda": _kda,
    "document_causal_flex_attention": _of_documents,
}


def delta_net(layer: Any, sharing: Sharing) -> None:
    """Put ours where a gated delta net holds its functions."""
    layer._cp_mesh, conv, rule = None, layer.causal_conv1d_fn, layer.chunk_gated_delta_rule
    of_fla = rule.__module__.startswith("fla.")
    q, k, v = names = ("q", "k", "v") if of_fla else ("query", "key", "value")

    def convolve(x: torch.Tensor, **given: Any) -> torch.Tensor:
        return dist_conv(lambda x, _: conv(x, **given), x, given["weight"].shape[-1], dim=2, **sharing.where)

    def scan(*tokens: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any) -> Any:
        norm = given.get("use_qk_l2norm_in_kernel", False)
        which = fla_scan(rule, keys=k, values=v, packs=of_fla, use_qk_l2norm_in_kernel=norm)
        return dist_scan(which, dict(zip(names, tokens, strict=True), g=g, beta=beta), **sharing.where)

    layer.causal_conv1d_fn, layer.chunk_gated_delta_rule = convolve, scan


# GLM: the indexer chooses over the ranks, and attention reads latents.


def glm(layer: Any, sharing: Sharing) -> None:
    """Give a layer of GLM-5 our choice of keys, or an earlier layer's, and our attention to it."""
    rank, inner = layer.kv_lora_rank, layer.qk_nope_head_dim
    latents: list[torch.Tensor] = []

    def attn_func(q: Any, k: Any, v: Any, *, attn_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        weight = getattr(layer.kv_b_proj, "materialize_effective_weight", lambda: layer.kv_b_proj.weight)()
        of_keys, of_values = weight.view(layer.n_heads, -1, rank).split([inner, layer.v_head_dim], 1)
        q = torch.cat([torch.einsum("bhsd,hdr->bshr", q[..., :inner], of_keys), q[..., inner:].transpose(1, 2)], 3)
        keys = torch.cat([latents.pop().unsqueeze(2), k[:, :1, :, inner:].transpose(1, 2)], 3)
        call = sharing.where | {"softmax_scale": layer.softmax_scale, "head_dim_v": rank}
        return torch.einsum("bshr,hdr->bhsd", sparse_attn(q, keys, None, attn_mask, **call), of_values)

    layer.kv_b_proj.register_forward_pre_hook(lambda _, args: latents.append(args[0]))
    layer._build_sparse_mask = lambda positions, *_, **__: positions
    layer.attn_func = attn_func
    if layer.indexer is not None:
        layer.indexer.forward = functools.partial(choose, layer.indexer, sharing)


@torch.no_grad()
def choose(indexer: Any, sharing: Sharing, x: Any, residual: Any, freqs: Any, mask: Any = None, **_: Any) -> Any:
    """Return the positions that an indexer chooses: rotary numbers first, and scores in float32, as in Automodel."""
    from nemo_automodel.components.models.glm_moe_dsa import layers

    def turn(states: torch.Tensor) -> torch.Tensor:
        rotary, rest = states.split([indexer.qk_rope_head_dim, indexer.qk_nope_head_dim], 3)
        of = layers.apply_rotary_emb if indexer.rope_interleave else layers._apply_index_rope_half_split
        return torch.cat([of(rotary, freqs, "bshd"), rest], 3)

    q = turn(indexer.wq_b(residual).unflatten(2, (indexer.num_heads, indexer.head_dim)))
    k = turn(indexer.k_norm(indexer.wk(x)).unsqueeze(2)).squeeze(2)
    weights = indexer.weights_proj(x).float() * indexer.num_heads**-0.5 * indexer.softmax_scale
    return index_topk(q.float(), k.float(), weights, indexer.index_topk, **sharing.where)


MIXERS = {
    "CPAwareGatedDeltaNet": delta_net,
    "Gemma4TextAttention": in_transformers,
    "GlmMoeDsaMLA": glm,
    "KimiDeltaAttention": kimi,
    "KimiMLAAttention": kimi,
    "MiMoV2FlashAttention": in_file,
    "_Qwen3_5MoeAttention": function,
}
"""What gives a layer our functions, by its class."""
