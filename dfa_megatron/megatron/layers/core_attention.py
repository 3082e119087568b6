"""Distributed attention for the `core_attention` slot of a Megatron attention layer.

Shapes, as Megatron passes them: query (seq / CP, batch, heads / TP, head_dim), key and value (seq / CP, batch,
kv_heads / TP, head_dim); the result is (seq / CP, batch, heads / TP * head_dim). Grouped heads are not expanded. Packed
documents are one row: batch = 1, and seq counts all tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dfa_megatron import attention
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.replace import reach
from dfa_megatron.megatron.tokens.packs import Pack
from dfa_megatron.megatron.tokens.visit import current_visit
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.agreement.calls import at_layer
from dfa_megatron.sequence.max_logits import max_logits

_BUILT_WITH = {
    "attn_mask_type": (None, "causal"),
    "attention_type": ("self",),
    "attention_dropout": (None, 0.0),
    "cp_comm_type": (None, "dfa", "p2p"),
}
"""The values that arguments of the constructor may have; p2p is Megatron's default."""


class DistributedCoreAttention(torch.nn.Module):
    """Compute self-attention over the sequence that the ranks of `pg_collection.cp` share (one rank works too).

    The ranks of a call, its documents, tree or mask are those of `current_visit`; without it is causal.

    With config.softmax_type "learnable" the module has one parameter: softmax_offset (heads / TP), a logit per head
    that takes part in the softmax and has no value. With "off-by-one" the offset is zero and no parameter.

    With config.qk_clip or log_max_attention_logit a training keeps the largest logits since Megatron's `clip_qk`,
    current_max_attn_logits, float32 (heads / TP), by a pass of its own.

    Megatron builds it by keyword; see megatron.core.transformer.attention.CoreAttentionBuilder.
    """

    dfa_reaches = ("attention",)

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        *,
        options: MegatronConfig,
        **others: Any,
    ) -> None:
        super().__init__()
        kinds = {"attn_mask_type": _name_of(attn_mask_type), "attention_type": attention_type}
        given = {**kinds, "attention_dropout": attention_dropout, "cp_comm_type": cp_comm_type, **_unknown(others)}
        for name, value in given.items():
            if value not in _BUILT_WITH.get(name, ()):
                raise UnsupportedError(
                    f"core attention with {name}={value!r}",
                    "it computes causal self-attention without dropout over one flat context-parallel group",
                    "leaving it unset, or --cp-comm-type dfa; a mask is params={'attn_mask_type': AttnMaskType.causal} "
                    "of the spec of self_attention",
                )
        if pg_collection is None:
            from megatron.core.process_groups_config import ProcessGroupCollection

            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.config = config
        self.layer_number = layer_number
        self.options = options
        self.cp_group = pg_collection.cp
        self.tp_group = getattr(pg_collection, "tp", None)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.window_size = _window_of(config, layer_number)
        self.softmax_offset = _softmax_offset(config)
        self.current_max_attn_logits: torch.Tensor | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Compute attention of this rank's rows over all rows that they see, of every rank."""
        reach("attention")
        visit = current_visit()
        pack = None if visit is None else visit.pack
        given = {"attention_mask": attention_mask, "attention_bias": attention_bias, **_unknown(others)}
        given["packed_seq_params"] = packed_seq_params
        if _name_of(attn_mask_type) != "causal":
            given["attn_mask_type"] = attn_mask_type
        self._check_call(given, pack, query, key)
        # Views only: the functions take any strides.
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        asked: dict[str, Any] = {
            "softmax_scale": self.softmax_scale,
            "sinks": self.softmax_offset,
            **self._attends(None if visit is None else visit.pairs),
            "group": self.cp_group if visit is None else visit.group,
            "layout": self.options.layout_inside if visit is None else visit.layout,
            "config": self.options,
        }
        out: Any
        with at_layer(self.layer_number):
            if self.training and (self.config.qk_clip or self.config.log_max_attention_logit):
                self._keep_maxima(q, k, pack, asked)
            if pack is None or "mask" in asked:
                out = attention.dist_flash_attn_func(q, k, v, **asked)
            else:
                q, k, v = (x.squeeze(0) for x in (q, k, v))
                out = attention.dist_flash_attn_varlen_func(q, k, v, pack.offsets, **asked)
                out = out.unsqueeze(0)
        rows: torch.Tensor = out.transpose(0, 1).flatten(2)
        return rows

    def _keep_maxima(self, q: torch.Tensor, k: torch.Tensor, pack: Pack | None, asked: dict[str, Any]) -> None:
        """Raise the largest logits to those of this call, over the documents of the pack; not in a recomputation."""
        if torch._C._current_graph_task_id() != -1:
            return
        offsets = None if pack is None or "mask" in asked else pack.offsets
        given = {name: value for name, value in asked.items() if name not in ("sinks", "config")}
        found, known = max_logits(q, k, cu_seqlens=offsets, **given), self.current_max_attn_logits
        self.current_max_attn_logits = found if known is None else torch.maximum(known, found)

    def _attends(self, pairs: Tree | Mask | None) -> dict[str, Any]:
        """Return the arguments of the functions that say who attends to whom."""
        if pairs is None:
            return {"causal": True, "window_size": self.window_size}
        if isinstance(pairs, Tree):
            return {"mask": pairs.mask(self.window_size[0])}
        if self.window_size != (-1, -1):
            raise UnsupportedError(
                f"a mask in a layer with window_size={self.window_size}",
                "the mask alone says which tokens attend to which",
                "a prompt_tree, or documents, whose windows count along paths; or no window_size",
            )
        return {"mask": pairs}

    def _check_call(self, given: dict[str, Any], pack: Pack | None, query: torch.Tensor, key: torch.Tensor) -> None:
        """Refuse what this attention would ignore."""
        if name := next((name for name, value in given.items() if value is not None), None):
            raise UnsupportedError(
                f"core attention called with {name}={given[name]!r:.80}",
                "it is causal by construction, and the kernels take neither mask nor bias nor what is not known here",
                "leaving it unset; packed_seq_params are for the layers of distribute_attention, which rotate each "
                "token by its position in its document",
            )
        if pack is not None and pack.pairs is None and query.shape[1] != 1:
            raise UnsupportedError(
                f"packed documents in {query.shape[1]} rows", "a pack is one row of tokens", "a batch from shard_batch"
            )
        if query.shape[0] != key.shape[0]:
            raise UnsupportedError(
                f"attention of {query.shape[0]} rows over {key.shape[0]}",
                "there is no key cache: every rank holds as many queries as keys",
                "training and evaluation on whole sequences",
            )

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the sharded state of Megatron's own attention: softmax_offset, cut over tensor-parallel ranks."""
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        return DotProductAttention.sharded_state_dict(self, *args, **kwargs)


def _softmax_offset(config: Any) -> torch.Tensor | None:
    """Return the offset (heads / TP), a parameter if it is learned, as in Megatron's own attention, or None."""
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    where: dict[str, Any] = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
    if kind == "off-by-one":
        return torch.zeros(heads, **where)
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    learned = torch.nn.Parameter(torch.zeros(heads, **where))
    if config.perform_initialization:
        config.init_method(learned)
    # Without this mark, as in Megatron, the gradient norm counts the heads of one tensor-parallel rank only.
    set_tensor_model_parallel_attributes(learned, is_parallel=True, dim=0, stride=1)
    return learned


def _window_of(config: Any, layer_number: int) -> tuple[int, int]:
    """Return a layer's window (left, right), -1 for no bound, as Megatron's own attention does."""
    window = getattr(config, "window_size", None)
    if not window:
        return -1, -1
    from megatron.core.transformer.utils import is_layer_window_attention

    windowed = is_layer_window_attention(window, getattr(config, "window_attn_skip_freq", None), layer_number)
    return (window[0], window[1]) if windowed else (-1, -1)


def _name_of(attn_mask_type: Any) -> Any:
    """Return the name of an AttnMaskType, None for None."""
    return getattr(attn_mask_type, "name", attn_mask_type)


def _unknown(others: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Megatron set and this class does not know. `name` is allowed: it has no effect."""
    return {name: value for name, value in others.items() if value is not None and name != "name"}
