"""What every layer of a distributed model does with a micro-batch: find its documents and its ranks."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.hybrid.in_order import InOrder
from dfa_megatron.megatron.layers.context import AttentionContext
from dfa_megatron.megatron.layers.router import has_losses, weigh_losses
from dfa_megatron.megatron.tokens.batch import check_declared
from dfa_megatron.megatron.tokens.packed_documents import PlacedPack, check_samples, is_ours, place
from dfa_megatron.megatron.tokens.visit import current_visit

_OWN_GROUPS = ("hybrid_context_parallel", "dynamic_context_parallel")
"""Fields of Megatron's TransformerConfig with which micro-batches name their own groups."""


def _holders(layer: Any) -> list[tuple[Any, str, Any]]:
    """Return who holds the groups of a layer: its modules, their collections of groups, and Megatron's global state."""
    from megatron.core import parallel_state

    groups = ("pg_collection", "cp_group")
    held = [(module, name, vars(module)[name]) for module in layer.modules() for name in groups if name in vars(module)]
    collections = {id(each): each for _, name, each in held if name == "pg_collection" and each is not None}
    held += [(each, "cp", vars(each).get("cp")) for each in collections.values()]
    state = "_CONTEXT_PARALLEL_GROUP"
    return [*held, (parallel_state, state, vars(parallel_state)[state])]


class SharingLayer:
    """Hold what a layer knows of the ranks that share a micro-batch; a base of all layers of this package.

    Hidden states are (tokens of this rank [/ TP under sequence parallelism], batch, hidden).
    """

    def _dfa_join(self, context: AttentionContext, groups: Any) -> None:
        """Join a model; Megatron's constructor has run. groups: its ProcessGroupCollection."""
        config: Any = self.config  # type: ignore[attr-defined]
        self._dfa, self._dfa_groups = context, groups
        own = any(getattr(config, name, False) for name in _OWN_GROUPS)
        self._dfa_several = config.context_parallel_size > 1 or own
        self._dfa_own: Any = None
        if self._dfa_several or config.sequence_parallel:
            weigh_losses(self)
        self._dfa_heeds: list[Any] = []
        """Modules that heed the documents of a micro-batch. In a list, their parameters are not this layer's."""
        self._dfa_regroupable = False
        self._dfa_built = _holders(self)
        """Every object that holds a group of this layer's, the attribute, and what it held when the layer was built."""

    def _dfa_placed(self, packed: Any, hidden_states: torch.Tensor) -> PlacedPack | None:
        """Return the documents of a micro-batch, None without.

        Raises:
            UnsupportedError: the documents, their group or the order of their tokens do not fit the model.
        """
        swapped = (name for holder, name, group in self._dfa_built if vars(holder).get(name) is not group)
        if name := next(swapped, None):
            raise UnsupportedError(
                f"a model whose groups were replaced after it was built ({name})",
                "its layers would follow the new ones in part, and mistake the order of the tokens",
                "local_cp_size and cp_group in packed_seq_params, a second model, or the groups of its construction",
            )
        pack = None
        if packed is None:
            self._dfa.check_unpacked()
        else:
            pack = self._dfa_read(packed, self._dfa_tokens(hidden_states))
        self._dfa_follow(pack)
        # A language model has looked at its tokens; Megatron's own recomputation runs a layer after it returned.
        if current_visit() is None and torch._C._current_graph_task_id() == -1:
            layout = self._dfa.options.data_layout
            if layout == "boundary" and self._dfa_group().size() > 1:
                raise UnsupportedError(
                    "layers outside a language model in data_layout='boundary'",
                    "tokens come in order where they enter Megatron's LanguageModule (GPTModel, HybridModel, ...)",
                    "such a model; or data_layout='contiguous' with batches of shard_batch, or 'zigzag'",
                )
            # A micro-batch of one document is cut in the same way by rows and by documents.
            several = pack is not None and (pack.group is None or len(pack.offsets) > 2)
            tokens = self._dfa_tokens(hidden_states)
            ours = packed is not None and is_ours(packed)
            check_declared(self._dfa_group(), layout, tokens, packed=several, ours=ours)
        return pack

    def _dfa_read(self, packed: Any, tokens: int) -> PlacedPack:
        layer: Any = self
        context = self._dfa
        hybrid = context.hybrid or getattr(layer.config, "is_hybrid_model", False)
        if hybrid and context.options.data_layout == "zigzag" and layer.config.context_parallel_size > 1:
            raise UnsupportedError(
                "packed documents in a hybrid model in layout 'zigzag'",
                "its other layers rely on Megatron's zigzag order of every document",
                "--dfa-data-layout boundary or contiguous",
            )
        pack = place(packed)
        group = self._dfa_groups.cp if pack.group is None else pack.group
        if context.options.data_layout == "boundary" and pack.is_cut_by_documents(group):
            pack = context.cut_pack(packed, group, tokens)
        check_samples(layer.config, packed, pack)
        if pack.group is not None and not self._dfa_regroupable:
            recurs = hybrid or isinstance(getattr(layer, "self_attention", None), InOrder)
            if recurs and context.options.data_layout == "zigzag":
                raise UnsupportedError(
                    "a cp_group of a micro-batch in layout 'zigzag' of a model with Mamba or gated delta net layers",
                    "these layers are Megatron's own, and exchange heads over the model's context-parallel group",
                    "--dfa-data-layout boundary or contiguous, or micro-batches without local_cp_size and cp_group",
                )
            router: Any = getattr(getattr(layer, "mlp", None), "router", None)
            mine = router is None or router.tp_cp_group.size() == self._dfa_groups.tp.size()
            counts = has_losses(layer.config) or layer.config.moe_expert_capacity_factor is not None
            if counts and not (mine and pack.group.size() == 1):
                raise UnsupportedError(
                    "a cp_group of a micro-batch with a router's losses, sinkhorn or moe_expert_capacity_factor",
                    "Megatron sums and counts them over the model's context-parallel group",
                    "moe_aux_loss_coeff=0 and no moe_z_loss_coeff, or micro-batches without local_cp_size and cp_group",
                )
            self._dfa_regroupable = True
        return pack

    def _dfa_follow(self, pack: PlacedPack | None) -> None:
        """Follow the ranks of a micro-batch, and hand its documents to the modules that heed them."""
        self._dfa_own = None if pack is None else pack.group
        for module in self._dfa_heeds:
            module.dfa_pack = pack

    def _dfa_group(self) -> Any:
        """Return the ranks that share the micro-batch."""
        return self._dfa_groups.cp if self._dfa_own is None else self._dfa_own

    def _dfa_tokens(self, hidden_states: torch.Tensor) -> int:
        """Return the tokens of this context-parallel rank, also where sequence parallelism splits them."""
        layer: Any = self
        return int(hidden_states.shape[0] * (self._dfa_groups.tp.size() if layer.config.sequence_parallel else 1))
