"""NVIDIA NeMo Automodel: our attention in place of the context parallelism that six of its models bring.

    distribute(model, device_mesh["cp"])  # once
    sharder = ContextParallelSharder(model, device_mesh, batch)  # as Automodel's recipes do for every batch
    context, batch = sharder.shard(batch)

The recipe counts labels and averages gradients as ever. `MIXERS` names the layers that get ours. The names are those of
nemo-automodel 0.7.0: .ci/automodel.sh compares toy models with one process.
"""

from __future__ import annotations

import functools
import inspect
import re
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

NAME = "dfa_automodel"  # of our attention and masks in transformers' registers, and of our attribute of a layer


@dataclass
class Sharing:
    """The ranks of a sequence, and the documents of the batch that they share now.

    documents: global offsets for each row; None where each row is one. Kimi's layers take it for their mesh, context
    and document ids, which only our functions read.
    """

    group: Any
    config: TrainingConfig
    documents: tuple[tuple[int, ...], ...] | None = None
    cp_enabled = True
    seq_start = 0

    def __post_init__(self) -> None:
        self.doc_ids = self.local_doc_ids = self

    @property
    def where(self) -> dict[str, Any]:
        return {"group": self.group, "config": self.config, "cu_seqlens": self.documents}

    def row(self, row: int) -> Sharing:
        return self if self.documents is None else replace(self, documents=self.documents[row : row + 1])

    def get_group(self) -> Sharing:
        return self


def distribute(model: torch.nn.Module, mesh: DeviceMesh, config: TrainingConfig | None = None) -> torch.nn.Module:
    """Give a model of Automodel our attention over the ranks of `mesh`, device_mesh["cp"], and our cut of its batches.

    model: with backend.attn="sdpa". It may be sharded already.
    """
    from nemo_automodel.components.distributed.context_parallel import sharder

    if mesh.size() == 1:
        return model
    backend = getattr(getattr(model, "backend", None), "attn", "sdpa")
    mixers = {getattr(x, WRAPPED, x): cls for x in model.modules() if (cls := _class_of(x))}
    missed = {type(x).__name__ for name, x in model.named_modules() if MIXER(name) and not _class_of(x)}
    for wrong, what, why, instead in (
        (backend != "sdpa", f"backend.attn={backend!r}", "ours stands in for sdpa", 'attn="sdpa"'),
        (getattr(model, "mtp", None) is not None, "MTP", "its tokens are shifted within a rank", "a model without"),
        (missed or not mixers, f"layers {missed or 'of other names'}", "they are not known", f"{', '.join(MIXERS)}"),
        ("prepare_model_inputs_for_cp" in vars(model), "two calls of distribute", "its layers have ours", "one call"),
    ):
        if wrong:
            raise UnsupportedError(f"Automodel's {type(model).__name__} with {what}", why, instead)
    sharing, more = Sharing(mesh.get_group(), TrainingConfig.of(config)), {}
    for module, cls in mixers.items():
        more |= MIXERS[cls.__name__](module, sharing, sys.modules[cls.__module__]) or {}
    for module in model.modules():  # their own way, where the recipe has set it up
        vars(module).pop("_cp_enabled", None)
    model.cp_mesh = None
    cut, places = functools.partial(shard, sharing, more), sharder.contiguous_local_indices
    model.prepare_model_inputs_for_cp = lambda batch, **_: {
        "cp_sharder": sharder.ContextParallelSharder(shard_batch=cut, local_token_global_indices=places)
    }
    return model


WRAPPED = "_checkpoint_wrapped_module"
MIXER = re.compile(rf"(?!.*(vision|visual|audio)).*(self_attn|linear_attn|mixer)(\.{WRAPPED})?").fullmatch


def _class_of(module: Any) -> type | None:
    classes = type(getattr(module, WRAPPED, module)).__mro__  # FSDP2 puts one of its own before a layer's
    return next((cls for cls in classes if cls.__name__ in MIXERS), None)


MEDIA = ("pixel_values", "image", "video", "audio", "input_features", "mm_token_type_ids")
PACKED = (
    "_packed_seq_ids", "attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "packed_token_indices",
    "qkv_format", "seq_lens", "seq_lens_padded",
)  # fmt: skip


def shard(sharing: Sharing, more: Any, mesh: Any, tp_mesh: Any, batch: dict[str, Any], **options: Any) -> Any:
    """Keep this rank's part of a batch, by Automodel's own contiguous cut, and remember the documents of all ranks."""
    from nemo_automodel.components.distributed.context_parallel import sharder

    if media := sorted(key for key in batch if key.startswith(MEDIA)):
        raise UnsupportedError(f"a batch with {', '.join(media)}", "its text is cut before images join", "text alone")
    ids = ids_of(batch)
    for key in PACKED:
        batch.pop(key, None)
    batch.setdefault("padding_mask", ids == 0)
    context, batch, layout = sharder.shard_batch_contiguous(mesh, tp_mesh, batch, **options)
    whole = bool((ids == ids[:, :1]).all())
    sharing.documents = None if whole else tuple(offsets_of(row, layout.padded_seq_len) for row in ids.cpu())
    return context, batch | more, layout


def ids_of(batch: dict[str, Any]) -> torch.Tensor:
    """Return the document of each token (batch, length), from 1 on, 0 for padding."""
    tokens, mask = batch["input_ids"], batch.get("_packed_seq_ids", batch.get("attention_mask"))
    lengths = batch.get("seq_lens_padded", batch.get("seq_lens"))
    if mask is not None and mask.dim() == 2:
        return mask
    if mask is not None or (lengths is None and batch.get("cu_seqlens") is not None):
        what = "a mask of four dimensions" if mask is not None else "cu_seqlens without seq_lens"
        raise UnsupportedError(what, "where documents begin is not told", "packing with document ids or seq_lens")
    if lengths is None:
        return torch.ones_like(tokens)
    at, ends = torch.arange(tokens.shape[1], device=lengths.device), lengths.clamp(min=0).cumsum(1)  # unused: below 0
    return ((at[None, :, None] >= ends[:, None]).sum(2) + 1).masked_fill(at >= ends[:, -1:], 0)


def offsets_of(row: torch.Tensor, length: int) -> tuple[int, ...]:
    """Return the offsets of a row's documents; padding, and what the cut adds, are documents of their own."""
    starts = (1 + torch.nonzero(row[1:] != row[:-1]).flatten()).tolist()
    return tuple(dict.fromkeys((0, *starts, len(row), length)))


def attend(sharing: Sharing, qkv: Any, scale: Any, window: int | None = None, dropout: Any = 0.0, **more: Any) -> Any:
    """Return attention (batch, tokens, heads, head_dim_v) of (batch, heads, tokens, head_dim); windows count itself."""
    if dropout:
        raise UnsupportedError("attention dropout", "the block kernels have none", "attention_dropout=0.0")
    q, k, v = (x.transpose(1, 2) for x in qkv)
    call = sharing.where | {"softmax_scale": scale, "window_size": (window - 1, 0) if window else (-1, -1), **more}
    if (documents := call.pop("cu_seqlens")) is None:
        return dist_flash_attn_func(q, k, v, causal=True, **call)
    return dist_flash_attn_varlen_func(q, k, v, documents, causal=True, **call)


def function(layer: Any, sharing: Sharing, _: Any) -> None:
    """Put ours where a layer of Qwen3.5 holds its function."""
    layer.attn_func = lambda *qkv, **_: attend(sharing, qkv, layer.scaling).transpose(1, 2)


def in_transformers(layer: Any, sharing: Sharing, _: Any) -> None:
    """Register ours for layers of Gemma 4, which are transformers' own; towers keep theirs."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any, dropout: float = 0.0, **more: Any
    ) -> Any:
        return attend(vars(layer)[NAME], (q, k, v), scaling, more.get("sliding_window"), dropout=dropout), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    if not layer.is_causal:
        raise UnsupportedError("attention in both directions", "a causal model is distributed", "a causal one")
    vars(layer)[NAME] = sharing
    layer.config._attn_implementation = NAME


def in_file(layer: Any, sharing: Sharing, module: Any) -> dict[str, Any]:
    """Replace what MiMo's layers call in their file, for layers that have a `Sharing`."""

    def replacing(own: Any) -> Any:
        def eager(layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0) -> Any:
            if (its := vars(layer).get(NAME)) is None:
                return own(layer, q, k, v, mask, scaling, dropout)
            call = {"dropout": dropout, "sinks": layer.attention_sink_bias}
            return attend(its, (q, k, v), scaling, layer.sliding_window, **call), None

        return eager

    vars(layer)[NAME] = sharing
    replace_name(module, "_eager_attention_forward", replacing)
    unread = torch.zeros(1, 1, 1, 1)  # in place of those of (tokens, tokens) that the model would make
    return {"attention_mask": {"full_attention": unread, "sliding_attention": unread}}


def kimi(layer: Any, sharing: Sharing, module: Any) -> dict[str, Any]:
    """Let Kimi Linear's and K3's own ways run, and replace what they call in their file with a `Sharing`."""
    layer._cp_mesh = sharing
    for name, ours in KIMI.items():
        replace_name(module, name, functools.partial(_given, ours))
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        if (conv := getattr(layer, name, None)) is not None:
            conv.forward = functools.partial(_convolve, conv.forward, layer.conv_size)
    return {"kimi_packed_context": sharing}


def _given(ours: Any, own: Any) -> Any:
    """Return a function that calls ours if a `Sharing` is among its arguments, and Automodel's otherwise."""

    def either(*args: Any, **kwargs: Any) -> Any:
        shared = any(isinstance(x, Sharing) for x in (*args, *kwargs.values()))
        return ours(own, *args, **kwargs) if shared else own(*args, **kwargs)

    return either


def _flex(own: Any, *qkv: torch.Tensor, q_doc_ids: Sharing, scale: float, **_: Any) -> torch.Tensor:
    return attend(q_doc_ids, qkv, scale).transpose(1, 2)


def _kda(own: Any, *, cp_context: Sharing, initial_state: None, cu_seqlens: None = None, **given: Any) -> Any:
    tokens = {name: given.pop(name) for name in ("q", "k", "v", "g", "beta")}
    return dist_scan(fla_scan(own, **given), tokens, **cp_context.where)


def _convolve(own: Any, width: int, x: torch.Tensor, cp_context: Sharing | None = None, **given: Any) -> Any:
    if cp_context is None:
        return own(x=x, **given)
    return dist_conv(lambda x, _: own(x=x, **given)[0], x, width, **cp_context.where), None


KIMI = {
    "all_gather_sequence": lambda own, x, group, dim: x,
    "build_fla_cp_context": lambda own, context, row, group, width: context.row(row),
    "chunk_kda": _kda,
    "document_causal_flex_attention": _flex,
}


def delta_net(layer: Any, sharing: Sharing, _: Any) -> None:
    """Put ours where a gated delta net of Qwen3.5 holds its functions."""
    layer._cp_mesh, conv, rule = None, layer.causal_conv1d_fn, layer.chunk_gated_delta_rule
    names = [*inspect.signature(rule).parameters][:3]  # q, k, v in FLA's kernel, longer ones in transformers'

    def scan(*qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial_state: None, **given: Any) -> Any:
        tokens = dict(zip(names, qkv, strict=True), g=g, beta=beta)
        return dist_scan(
            fla_scan(rule, keys=names[1], values=names[2], packs=names[0] == "q", **given), tokens, **sharing.where
        )

    layer.chunk_gated_delta_rule = scan
    more = {"width": layer.conv_kernel_size, "dim": 2}
    layer.causal_conv1d_fn = lambda x, **given: dist_conv(lambda x, _: conv(x, **given), x, **more, **sharing.where)


def glm(layer: Any, sharing: Sharing, module: Any) -> None:
    """Give a layer of GLM-5 our choice of keys, or an earlier layer's, and attention that reads latents."""
    rank, inner, latents = layer.kv_lora_rank, layer.qk_nope_head_dim, []

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
        layer.indexer.forward = functools.partial(choose, module, layer.indexer, sharing)


@torch.no_grad()
def choose(module: Any, indexer: Any, sharing: Sharing, x: Any, residual: Any, freqs: Any, *_: Any, **__: Any) -> Any:
    """Return the positions that an indexer chooses: rotary numbers first, and scores in float32, as in Automodel."""

    def turned(states: torch.Tensor) -> torch.Tensor:
        rotary, rest = states.split([indexer.qk_rope_head_dim, indexer.qk_nope_head_dim], 3)
        turn = module.apply_rotary_emb if indexer.rope_interleave else module._apply_index_rope_half_split
        return torch.cat([turn(rotary, freqs, "bshd"), rest], 3).float()

    q = turned(indexer.wq_b(residual).unflatten(2, (indexer.num_heads, indexer.head_dim)))
    k = turned(indexer.k_norm(indexer.wk(x)).unsqueeze(2)).squeeze(2)
    weights = indexer.weights_proj(x).float() * indexer.num_heads**-0.5 * indexer.softmax_scale
    return index_topk(q, k, weights, indexer.index_topk, **sharing.where)


MIXERS = {
    "CPAwareGatedDeltaNet": delta_net,
    "Gemma4TextAttention": in_transformers,
    "GlmMoeDsaMLA": glm,
    "KimiDeltaAttention": kimi,
    "KimiMLAAttention": kimi,
    "MiMoV2FlashAttention": in_file,
    "_Qwen3_5MoeAttention": function,
}
"""What gives a layer ours, by its class; it returns what batches get beside their parts."""
