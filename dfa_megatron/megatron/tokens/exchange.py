"""Move the rows of a sequence-first tensor between two layouts, in one all-to-all.

Shapes: a tensor here is (rows, ...). The rows are this rank's tokens: length / CP.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dfa_megatron.plan.language.layout import Layout, by_name
from dfa_megatron.runtime.execute.moves import Moves, move_rows, moves_between

_KEPT = 16
"""Plans of a group that are kept, there and back: packs rarely come again, and one holds 32 bytes of a token."""


class Exchange:
    """Exchange rows between layouts over one group; plans are made once per length and pack.

    Args:
        group: the ranks that share the sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._plans: dict[tuple[str | Layout, str | Layout, int, torch.device], Moves] = {}

    def move(self, rows: torch.Tensor, source: str | Layout, target: str | Layout) -> torch.Tensor:
        """Return this rank's rows (local rows, ...) in the target layout, given its rows in the source; no autograd."""
        return rows if (moves := self._moves(rows, source, target)) is None else moves.run(rows, self.group)

    def __call__(self, rows: torch.Tensor, source: str | Layout, target: str | Layout) -> torch.Tensor:
        """Move rows like `move`, and gradients in the other direction."""
        return rows if (moves := self._moves(rows, source, target)) is None else move_rows(rows, moves, self.group)

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
