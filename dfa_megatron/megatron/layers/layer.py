"""Mixins over Megatron's layers: the documents and ranks of a call, its rotary rows in order, and rematerialization.

Shapes: hidden_states (seq / CP [/ TP under sequence parallelism], batch, hidden).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.in_order import OTHER_ORDER, InOrder
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.layers.rotary import order_rotary, rows_of
from dfa_megatron.megatron.layers.router import weigh_losses
from dfa_megatron.megatron.layers.swapped import check_groups, check_size, group_holders, state_group
from dfa_megatron.megatron.replace import watch
from dfa_megatron.megatron.tokens.visit import Visit, current_visit, running
from dfa_megatron.remat import remat_checkpoint

_FLAGS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
"""The fields of a TransformerConfig that ask for recomputation."""


class DistributedLayer:
    """Run any layer of a distributed model; the first base of its class.

    Its modules find the documents and ranks of the call by `current_visit`, in a recomputation too. Where the layer is
    rematerialized, it runs inside Megatron's own checkpoint: the first pass saves attention's output and lse, and the
    recompute takes them, so attention and its messages never run twice.
    """

    def __init__(self, config: Any, *args: Any, distributed_attention: AttentionContext, **kwargs: Any) -> None:
        shared = distributed_attention
        check_config(config, shared.options)
        covered = takes_over(config, shared, kwargs.get("layer_number", 1))
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        layer: Any = self
        self._dfa = shared
        groups: Any = getattr(layer, "pg_collection", None) or kwargs["pg_collection"]
        self.cp_group, self._dfa_tp, self._dfa_state = groups.cp, groups.tp, state_group()
        check_size(config, self.cp_group)
        self._dfa_remat = shared.options.checkpoint == "remat" or bool(covered)
        self._dfa_took_over = covered is not None
        if self.cp_group.size() > 1 or config.sequence_parallel:
            weigh_losses(self)
        self._dfa_got_rows = False
        self._dfa_mixes = mixes(self, shared.options.layout_inside)
        if self._dfa_mixes:
            watch(getattr(layer, "mixer", None) or layer.self_attention)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, with the same result."""
        visit = self._dfa_visit(kwargs.get("packed_seq_params"), hidden_states)
        if self._dfa_mixes:
            kwargs.pop("packed_seq_params", None)
        return self._dfa_run(visit, hidden_states, *args, **kwargs)

    def _dfa_visit(self, packed: Any, hidden_states: torch.Tensor) -> Visit | None:
        """Return the call of the language model; outside of one, and in Megatron's recomputation, the layer's own."""
        visit = current_visit()
        if visit is not None or (packed is None and self.cp_group.size() == 1):
            return visit
        layer: Any = self
        splits = self._dfa_tp.size() if layer.config.sequence_parallel else 1
        rows = hidden_states.shape[1], hidden_states.shape[0] * splits
        if torch._C._current_graph_task_id() != -1:  # Megatron recomputes what its language model has checked
            if self._dfa_took_over:
                raise UnsupportedError(
                    "--recompute-granularity full in a block of layers outside a language model",
                    "Megatron's block would recompute attention, which the layers rematerialize already",
                    "a LanguageModule around it (GPTModel, ...); or checkpoint='remat' without Megatron's flag",
                )
            visit = self._dfa.visit(layer, packed, self.cp_group, rows, checked=True)
            if visit is not None:
                visit.has_rotated = self._dfa_got_rows
            return visit
        check_groups(group_holders(layer), self.cp_group, self._dfa_state)
        visit = self._dfa.visit(layer, packed, self.cp_group, rows)
        where = "with prediction layers" if self.cp_group.size() > 1 and layer.config.mtp_num_layers else ""
        if visit is not None and (visit.moves or where):
            raise UnsupportedError(
                f"layers outside a language model {where or 'in layout boundary'}",
                "Megatron's LanguageModule (GPTModel, ...) orders and rolls tokens; a forward set on a model does not",
                "that forward; or data_layout='contiguous' with shard_batch, or 'zigzag', without prediction layers",
            )
        return visit

    def _dfa_run(
        self, visit: Visit | None, hidden_states: torch.Tensor, *args: Any, context: Any = None, **kwargs: Any
    ) -> Any:
        """Run the base's forward, in a checkpoint if the layer is rematerialized."""
        layer: Any = self

        def body(hidden_states: torch.Tensor, context: torch.Tensor | None) -> Any:
            more = {} if context is None else {"context": context}
            with running(visit):
                return super(DistributedLayer, layer).forward(hidden_states, *args, **more, **kwargs)  # type: ignore[misc]

        wanted = self._dfa_remat and layer.training
        # A re-entrant checkpoint gives the layer's parameters no gradient if the input has none.
        if not (wanted and torch.is_grad_enabled() and hidden_states.requires_grad):
            return body(hidden_states, context)
        checkpoint = checkpoint_of(layer.config, self._dfa_tp)
        offload = self._dfa.options.remat_offload
        return remat_checkpoint(body, hidden_states, context, checkpoint=checkpoint, offload=offload)


class DistributedAttentionLayer(DistributedLayer):
    """Run a TransformerLayer with distributed attention.

    Each token gets the rotary row of its position in its document, by the rotary module of the language model or of a
    latent attention. A layer outside of a language model takes these rows itself, of a whole table.
    """

    def __init__(self, config: Any, *args: Any, distributed_attention: AttentionContext, **kwargs: Any) -> None:
        shared = distributed_attention
        super().__init__(config, *args, distributed_attention=shared, **kwargs)
        layer: Any = self
        alone = getattr(config, "is_hybrid_model", False) and not shared.hybrid
        if alone and config.context_parallel_size > 1 and shared.options.data_layout != "zigzag":
            raise UnsupportedError(
                "an attention layer by itself in a hybrid model",
                "the layers beside it rely on Megatron's zigzag order",
                "distribute_attention of the whole hybrid stack spec, or --dfa-data-layout zigzag",
            )
        core = getattr(layer.self_attention, "core_attention", None)
        ours = [x for x in layer.self_attention.modules() if isinstance(x, DistributedCoreAttention)]
        if ours != [core] * (core is not None):
            raise UnsupportedError(
                f"a distributed layer whose core_attention became {type(core).__name__}",
                "something replaced it behind distribute_attention, and would mistake the order of the tokens",
                "leaving the spec as it is (attention_backend other than 'local')",
            )
        if core is not None and getattr(layer.config, "multi_latent_attention", False):
            order_rotary(layer.self_attention)
        shared.say_once(
            "dfa: distributed attention over %d context-parallel ranks, layout %s, schedule %s; %s",
            config.context_parallel_size,
            shared.options.data_layout,
            shared.options.schedule,
            "layers are recomputed without their attention" if self._dfa_remat else "recomputation is left to Megatron",
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        rotary_pos_emb: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run TransformerLayer.forward, with the same result."""
        if attention_mask is not None:
            raise UnsupportedError(
                "an attention_mask tensor",
                "attention is causal by construction and would ignore the tensor",
                "attention_mask=None, which in Megatron's scripts is --no-create-attention-mask-in-dataloader; "
                "documents are described by packed_seq_params",
            )
        visit = self._dfa_visit(kwargs.pop("packed_seq_params", None), hidden_states)
        if visit is not None and rotary_pos_emb is not None:
            self._dfa_got_rows = visit.has_rotated
            rotary_pos_emb = rotary_pos_emb if visit.has_rotated else rows_of(rotary_pos_emb, visit)
        kwargs.update(context=context, context_mask=context_mask, rotary_pos_emb=rotary_pos_emb)
        return self._dfa_run(visit, hidden_states, **kwargs)


def mixes(layer: Any, layout_inside: str) -> bool:
    """Return whether tokens meet in a layer by a module of this package, which reads the documents of the call."""
    from megatron.core.transformer.identity_op import IdentityOp

    mixer = getattr(layer, "mixer", getattr(layer, "self_attention", None))
    if mixer is None or isinstance(mixer, IdentityOp):
        return False
    if isinstance(mixer, InOrder) or isinstance(getattr(mixer, "core_attention", None), DistributedCoreAttention):
        return True
    if layout_inside == "contiguous" and not isinstance(layer, DistributedAttentionLayer):  # its spec was checked
        raise UnsupportedError(f"the mixer {type(mixer).__name__} where tokens are in order", *OTHER_ORDER)
    return False


def takes_over(config: Any, context: AttentionContext, local_layer: int) -> bool | None:
    """Return whether Megatron's flags of full recomputation cover the local_layer-th layer (from 1) of a model chunk.

    None: they are off, or left to Megatron by checkpoint='none'. `hide_flags` hides them from the blocks.
    """
    granularity, method, layers = (vars(config).get(name) for name in _FLAGS)
    if granularity != "full" or not context.options.saves_attention:
        return None
    if context.hybrid and method == "block":
        raise UnsupportedError(
            "recompute_method='block' in a hybrid model",
            "not every layer of its stack knows its place in the pipeline stage",
            "--recompute-method uniform --recompute-num-layers 1",
        )
    return method != "block" or local_layer <= (layers or 0)


def hide_flags(block: Any) -> None:
    """Give a block, which reads the flags in every forward, a view of its config without them.

    The view has the same fields, later changes included. A model keeps the config itself, to which scripts add
    functions, and of which other models may be built.
    """
    base: Any = type(block.config)
    view: Any = object.__new__(_view_class(base))
    view.__dict__ = vars(block.config)
    block.config = view


@functools.cache
def _view_class(base: type) -> type:
    def hidden(name: str) -> property:
        return property(lambda view: None, lambda view, value: vars(view).update({name: value}))

    return type(base.__name__, (base,), {"__module__": __name__, **{name: hidden(name) for name in _FLAGS}})


def checkpoint_of(config: Any, tp_group: Any) -> Callable[..., Any]:
    """Return Megatron's activation checkpoint as `checkpoint(run, *args)`: Transformer Engine's under fp8."""
    from megatron.core import tensor_parallel

    distribute = bool(config.distribute_saved_activations)
    if getattr(config, "fp8", None):
        from megatron.core.extensions.transformer_engine import te_checkpoint

        tracker = tensor_parallel.random.get_cuda_rng_tracker
        return lambda run, *args: te_checkpoint(run, distribute, tracker, tp_group, *args)
    return lambda run, *args: tensor_parallel.checkpoint(run, distribute, *args)
