"""One call of a language model: who shares its tokens, in which order they are, and how they change it at the door."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.hooks import for_a_while
from dfa_megatron.megatron.tokens.packs import Pack
from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.cu_seqlens import Offsets, check_offsets
from dfa_megatron.runtime.execute.moves import Moves, move_rows, moves_between
from dfa_megatron.sharding import local_positions, shard_sequence

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: integers that hold any of them."""

_KEPT = 16
"""Plans of a group that are kept, there and back: packs rarely come again, and one holds 32 bytes of a token."""


class Exchange:
    """Exchange rows between layouts over one group; plans are made once per length and pack.

    Args:
        group: the ranks that share the sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.agreed: dict[tuple[Offsets, Offsets], None] = {}
        """The packs that its ranks have compared."""
        self._plans: dict[tuple[str | Layout, str | Layout, int, torch.device], Moves] = {}

    def move(self, rows: torch.Tensor, source: str | Layout, target: str | Layout) -> torch.Tensor:
        """Return this rank's rows (local rows, ...) in the target layout, given its rows in the source; no autograd."""
        return rows if (moves := self._moves(rows, source, target)) is None else moves.run(rows, self.group)

    def __call__(self, rows: torch.Tensor, source: str | Layout, target: str | Layout) -> torch.Tensor:
        """Move rows like `move`, and gradients in the other direction."""
        return rows if (plan := self._moves(rows, source, target)) is None else move_rows(rows, plan, group=self.group)

    def _moves(self, rows: torch.Tensor, source: str | Layout, target: str | Layout) -> Moves | None:
        ranks = self.group.size()
        if ranks == 1 or source == target:
            return None
        count, device = rows.shape[0], rows.device
        plan = self._plans.get((source, target, count, device))
        if plan is None:
            while len(self._plans) > _KEPT - 2:
                del self._plans[next(iter(self._plans))]
            both = [by_name(x, count * ranks, ranks) if isinstance(x, str) else x for x in (source, target)]
            held, wanted = ([layout.spans(rank) for rank in range(ranks)] for layout in both)
            plan = moves_between(held, wanted, self.group.rank(), device)
            self._plans[source, target, count, device] = plan
            self._plans[target, source, count, device] = plan.back()
        return plan


@dataclass
class Visit:
    """Hold what the call of a model needs until it returns, and what its layers need when they are recomputed."""

    model: Any
    """The language model; a layer that runs outside of one."""
    group: dist.ProcessGroup
    """The ranks that share the tokens."""
    layout: str | Layout
    """How they share them inside the model: contiguous or zigzag, by name where all ranks hold equally many tokens."""
    outside: str | Layout
    """How the caller's batch is cut; another one than `layout` in layout `boundary` alone."""
    pack: Pack | None
    """The documents."""
    rows: tuple[int, int]
    """Batch and tokens of this rank."""
    exchange: Exchange
    predicting: bool = False
    """The output layer is called for prediction layers, whose labels are inside."""
    outputs: int = 0
    """How often hidden states went back before the output layer."""
    has_rotated: bool = False
    """The model's rotary module has returned this rank's rows."""

    @property
    def offsets(self) -> Offsets:
        """Return the global offsets of the documents inside; () without."""
        return () if self.pack is None else self.pack.offsets

    @property
    def pairs(self) -> Tree | Mask | None:
        """Return the tree or the mask that says who attends to whom, if any."""
        return None if self.pack is None else self.pack.pairs

    @property
    def moves(self) -> bool:
        """Return whether tokens change their order."""
        return self.outside != self.layout and self.group.size() > 1

    @property
    def tokens(self) -> int:
        """Return the tokens of all ranks."""
        return self.layout.length if isinstance(self.layout, Layout) else self.rows[1] * self.group.size()

    def positions(self, device: torch.device, *, in_documents: bool = True) -> torch.Tensor:
        """Return the position of each token of this rank in its document or path, or in the row; int64 (tokens,)."""
        pack = self.pack if in_documents else None
        if pack is None:
            return local_positions(self.tokens, group=self.group, layout=self.layout, device=device)
        check_offsets(pack.offsets, self.tokens)
        if pack.places is not None:
            return shard_sequence(pack.places, group=self.group, layout=self.layout, dim=0).to(device)
        return local_positions(
            self.tokens, group=self.group, layout=self.layout, device=device, cu_seqlens=pack.offsets
        )

    def of_tokens(self, x: Any) -> bool:
        """Return whether a tensor is (batch or 1, tokens, ...)."""
        is_tensor = isinstance(x, torch.Tensor) and x.dim() > 1
        return is_tensor and x.shape[1] == self.rows[1] and x.shape[0] in (1, self.rows[0])

    def enter(self, tokens: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors (batch, tokens, ...) in the model's order: all of two dimensions by one all-to-all."""
        flat = {name: x for name, x in tokens.items() if x.dim() == 2 and not x.requires_grad}
        moved = {name: self._by_token(x, self.outside, self.layout) for name, x in tokens.items() if name not in flat}
        if not flat:
            return moved
        bits = [x.contiguous().view(_INTEGERS[x.element_size()]).long() for x in flat.values()]
        rows = self.exchange.move(torch.cat(bits).mT, self.outside, self.layout).mT
        for (name, x), part in zip(flat.items(), rows.split([len(x) for x in bits]), strict=True):
            moved[name] = part.to(_INTEGERS[x.element_size()]).contiguous().view(x.dtype)
        return moved

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens, ...) in the caller's order; gradients go the other way."""
        return self._by_token(x, self.layout, self.outside)

    def _by_token(self, x: torch.Tensor, source: str | Layout, target: str | Layout) -> torch.Tensor:
        return self.exchange(x.transpose(0, 1).contiguous(), source, target).transpose(0, 1).contiguous()

    def hidden(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Return hidden states (tokens [/ TP under sequence parallelism], batch, hidden) in the other order."""
        from megatron.core.tensor_parallel import mappings

        way = (self.layout, self.outside) if back else (self.outside, self.layout)
        if not self.model.config.sequence_parallel:
            return self.exchange(x, *way)
        tp = self.model.pg_collection.tp
        whole = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=tp)
        split: torch.Tensor = mappings.scatter_to_sequence_parallel_region(self.exchange(whole, *way), group=tp)
        return split


class _RunningVisit(threading.local):
    visit: Visit | None = None


_VISIT = _RunningVisit()


def running(visit: Visit | None) -> AbstractContextManager[None]:
    """Make a visit the current one; None: the model that runs is not distributed."""
    return for_a_while(_VISIT, visit=visit)


def current_visit() -> Visit | None:
    """Return the visit of the innermost distributed model, or layer, that this thread runs or recomputes."""
    return _VISIT.visit
