"""State that the layers of one model share: options and the exchange of layouts; checks of its calls."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.check_config import check_uneven
from dfa_megatron.megatron.layers.router import has_losses
from dfa_megatron.megatron.script.dfa_flags import packing_of_script
from dfa_megatron.megatron.tokens.cuts import check_declared
from dfa_megatron.megatron.tokens.packs import BatchParams, Pack, check_samples, read_pack
from dfa_megatron.megatron.tokens.visit import Exchange, Visit
from dfa_megatron.plan.language.layout import Layout, by_name, of_lengths
from dfa_megatron.runtime.comm.compared import telling
from dfa_megatron.runtime.cu_seqlens import check_offsets, describe
from dfa_megatron.whole_batch import check_length

logger = logging.getLogger("dfa_megatron.megatron")

CONTEXT = "dfa_context"
"""The attribute of a spec that holds the context of the models that are built of it."""

_SPECS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec")
"""The attributes of Megatron's models that hold the spec of their layers."""

_KEPT = 256
"""Packs of a group that a model remembers to have compared."""


class AttentionContext:
    """Hold what all models built of one spec share, in the `params` of its layers; copies of a spec share it.

    Args:
        options: the user's options.
        hybrid: layers of other kinds stand between the attention layers.
    """

    def __init__(self, options: MegatronConfig, *, hybrid: bool = False) -> None:
        self.options = options
        self.hybrid = hybrid
        self.lengths: set[tuple[dist.ProcessGroup, int]] = set()
        """The tokens of a rank in batches whose positions were looked at."""
        self.exchange = functools.cache(Exchange)
        """Returns the exchange over the ranks that share a micro-batch."""
        self._said = False

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionContext:
        return self

    def visit(
        self, model: Any, packed: Any, cp_group: dist.ProcessGroup, rows: tuple[int, int], *, checked: bool = False
    ) -> Visit | None:
        """Return what a call needs to know, None where one rank has a sequence without documents.

        Args:
            model: a language model, or a layer outside of one.
            packed: Megatron's PackedSeqParams, or None.
            cp_group: of the model; a micro-batch may name its own.
            rows: the batch and the tokens of this rank.
            checked: the same call was checked before.
        """
        pack = None if packed is None else read_pack(packed)
        if pack is None and packing_of_script():  # Megatron-Core 0.16 tells the first and the last stage only
            raise UnsupportedError(
                "a pipeline stage that was given no packed_seq_params",
                "the script's data are packed documents, and attention here would not stop at their ends",
                "at most two pipeline stages, or scripts of Megatron-Core 0.19 and later",
            )
        if pack is None and cp_group.size() == 1:
            return None
        group = cp_group if pack is None or pack.group is None else pack.group
        if not checked:
            # A micro-batch of one document is cut in the same way by rows and by documents.
            several = pack is not None and (pack.group is None or len(pack.offsets) > 2)
            ours = isinstance(packed, BatchParams)
            check_declared(group, self.options.data_layout, rows[1], packed=several, ours=ours)
            if pack is not None:
                if pack.pairs is not None and pack.pairs.length % group.size() == 0:
                    with telling(group, self.options):
                        check_length(pack.pairs, rows[1] * group.size())
                self._check_pack(model, packed, pack, group)
        outside: str | Layout = self.options.layout_inside
        if self.options.data_layout == "boundary":
            if pack is not None and pack.is_cut_by_documents(group):
                pack = self.cut_pack(packed, group, rows[1])
            outside = "zigzag" if pack is None else pack.layout(group)
        layout: str | Layout = "contiguous" if group.size() == 1 else self.options.layout_inside
        if pack is not None and pack.offsets[-1] % group.size() and isinstance(outside, str):
            outside = by_name(outside, pack.offsets[-1], group.size())
            counts = [outside.tokens(rank) for rank in range(group.size())]
            with telling(group, self.options):
                check_uneven(model.config, counts, rows[1], group.rank())
            layout = of_lengths(counts) if self.options.data_layout == "boundary" else outside
        return Visit(model, group, layout, outside, pack, rows, self.exchange(group))

    def _check_pack(self, model: Any, packed: Any, pack: Pack, group: dist.ProcessGroup) -> None:
        """Refuse documents, a tree, a mask or a group of their own that a part of the model would not follow."""
        config, zigzag = model.config, self.options.data_layout == "zigzag"
        names = ("is_hybrid_model", "experimental_attention_variant", "linear_attention_freq")
        mixers = self.hybrid or any(getattr(config, name, None) for name in names)
        if mixers and zigzag and (pack.pairs is not None or max(group.size(), config.context_parallel_size) > 1):
            raise UnsupportedError(
                "packs, trees and masks in a model with Mamba or gated delta net layers in layout 'zigzag'",
                "these layers are Megatron's own: they know its zigzag order of rows, and exchange heads over the "
                "model's context-parallel group",
                "--dfa-data-layout boundary or contiguous",
            )
        if pack.pairs is not None and getattr(config, "mtp_num_layers", None):
            raise UnsupportedError(
                "a prompt_tree or a mask with multi-token prediction",
                "the token after the next is another one in every branch",
                "mtp_num_layers=None, or documents",
            )
        check_samples(config, packed, pack)
        if pack.group is not None and has_losses(config):
            groups = [module.tp_cp_group for module in model.modules() if hasattr(module, "tp_cp_group")]
            if pack.group.size() > 1 or any(x.size() > config.tensor_model_parallel_size for x in groups):
                raise UnsupportedError(
                    "a cp_group of a micro-batch with a router's losses, or sinkhorn",
                    "Megatron sums and counts them over the model's context-parallel group",
                    "moe_aux_loss_coeff=0 and no moe_z_loss_coeff, or micro-batches without local_cp_size and cp_group",
                )

    def cut_pack(self, params: Any, group: dist.ProcessGroup, tokens: int) -> Pack:
        """Return the pack of a PackedSeqParams whose documents were cut one by one; ranks compare a new pack."""
        with telling(group, self.options) as over:
            pack = read_pack(params, group.size())
            check_offsets(pack.padded, tokens * group.size())
        key, agreed = (pack.offsets, pack.padded), self.exchange(group).agreed
        if key not in agreed and self.options.verify == "on" and over is not None:
            with over.calls.preparing():
                over.agree({"pack": describe(pack.offsets), "with padding": describe(pack.padded)})
        agreed[key] = None
        if len(agreed) > _KEPT:
            del agreed[next(iter(agreed))]
        return pack

    def say_once(self, message: str, *args: Any) -> None:
        """Log a line about the model, the first time, on global rank 0."""
        if not self._said and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.info(message, *args)
        self._said = True


def context_of(model: Any) -> AttentionContext | None:
    """Return the context of a distributed model, None of another: its layers', or its spec's where a stage has none."""
    layer = next((module for module in model.modules() if hasattr(module, "_dfa")), None)
    if layer is not None:
        return layer._dfa  # type: ignore[no-any-return]
    spec = next((vars(model)[name] for name in _SPECS if name in vars(model)), None)
    each = [spec, *(getattr(spec, "layer_specs", None) or ())]
    return next((vars(one)[CONTEXT] for one in each if CONTEXT in getattr(one, "__dict__", ())), None)
