"""State that the layers of one model share: options, the exchange of layouts, rotary tables, lines logged once."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.start.dfa_flags import packs_of_args
from dfa_megatron.megatron.tokens.document_order import DocumentOrder
from dfa_megatron.megatron.tokens.exchange import Relayout, TableCache
from dfa_megatron.megatron.tokens.packed_documents import PlacedPack, place
from dfa_megatron.runtime.agreement.guard import Guard
from dfa_megatron.runtime.comm.registry import channel
from dfa_megatron.runtime.cu_seqlens import describe
from dfa_megatron.runtime.prepare import refuse
from dfa_megatron.runtime.request import Request

if TYPE_CHECKING:
    from dfa_megatron.megatron.layers.recompute import Recompute

logger = logging.getLogger("dfa_megatron.megatron")

CONTEXT = "dfa_context"
"""The attribute of a stack's or a block's submodules that holds the model's context."""

_KEPT = 256
"""Packs that a model remembers to have compared."""


class AttentionContext:
    """Hold the state of one model in the `params` of its layer specs; copies of a spec share it.

    Args:
        options: the user's options.
        hybrid: layers of other kinds stand between the attention layers.
    """

    def __init__(self, options: DistAttentionConfig, *, hybrid: bool = False) -> None:
        self.options = options
        self.hybrid = hybrid
        self.recompute: Recompute | None = None
        """The flags on the model's config, where each layer has a config of its own."""
        self._checked = False
        self.tables = TableCache()
        self.lengths: set[int] = set()
        """The tokens of a rank in batches whose positions were looked at."""
        self._relayouts: dict[dist.ProcessGroup, Relayout] = {}
        self._said: set[str] = set()
        self._agreed: dict[tuple[str, DocumentOrder], None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionContext:
        return self

    def check(self, config: Any) -> None:
        """Check the model's configuration, once: layers share it, or have copies with other sizes."""
        if not self._checked:
            check_config(config, self.options)
        self._checked = True

    def relayout(self, group: dist.ProcessGroup) -> Relayout:
        """Return the exchange over the ranks that share a micro-batch, the same object for the same group."""
        if group not in self._relayouts:
            self._relayouts[group] = Relayout(group)
        return self._relayouts[group]

    @cached_property
    def _guard(self) -> Guard:
        """How the calls of every group are looked after."""
        return Request(softmax_scale=1.0, config=self.options.within("function")).guard

    def cut_pack(self, params: Any, group: dist.ProcessGroup, tokens: int) -> PlacedPack:
        """Return the pack of a PackedSeqParams whose documents were cut one by one; ranks compare a new pack.

        Raises:
            UnsupportedError: its offsets do not fit; every rank raises.
            DisagreementError: another rank refuses, or has other documents.
        """
        guard, name = self._guard, group.group_name
        try:
            pack = place(params, group.size())
            order = pack.order
            assert isinstance(order, DocumentOrder)
            order.check_tokens(tokens * group.size())
        except DistAttentionError as error:
            refuse(error, name, guard)
            raise
        key = (name, order)
        if key not in self._agreed and guard.verify:
            over = channel(name, guard)
            with over.calls.preparing():
                over.agree({"pack": describe(order.real), "with padding": describe(order.padded)})
        self._agreed[key] = None
        if len(self._agreed) > _KEPT:
            del self._agreed[next(iter(self._agreed))]
        return pack

    def say_once(self, key: str, message: str, *args: Any, level: int = logging.INFO) -> None:
        """Log a line the first time its key is used, on global rank 0."""
        if key not in self._said and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.log(level, message, *args)
        self._said.add(key)

    def check_unpacked(self) -> None:
        """Refuse a batch without documents where the script's flags promise documents.

        Scripts of Megatron-Core 0.16 pass them to the first and the last pipeline stage only.
        """
        if "unpacked" not in self._said and packs_of_args():
            raise UnsupportedError(
                "a pipeline stage that was given no packed_seq_params",
                "the script's data are packed documents, and attention here would not stop at their ends",
                "at most two pipeline stages, or scripts of Megatron-Core 0.17 and later",
            )
        self._said.add("unpacked")
