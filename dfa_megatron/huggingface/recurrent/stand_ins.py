"""The functions that recurrent layers of transformers call, over a sequence that is spread over ranks.

Each takes the function that it stands in for and that call's arguments by name, and runs it on this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.huggingface.positions.document_starts import Documents
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.recurrence import dist_conv, dist_mamba1, dist_mamba2, dist_scan, fla_scan
from dfa_megatron.runtime.cu_seqlens import Offsets

Keywords = dict[str, Any]
Real = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Hold what a layer computes over.

    layer: its number, from 1, for messages.
    documents: token offsets of every row, in the sequence of all ranks; None if each row is one document.
    tree: the segments of every row, in place of documents.
    layout: the tokens of every rank, as for `dist_scan`.
    """

    layer: int
    group: str
    config: TrainingConfig
    documents: Documents | None
    tree: Tree | None
    layout: Layout | str = "contiguous"

    def rows(self, given: Keywords, *names: str) -> Iterator[tuple[Keywords, dict[str, Any]]]:
        """Yield the arguments, with those named cut to rows that share documents, and options of a recurrence.

        Arguments that are missing or None are left as they are.
        """
        options: dict[str, Any] = {"group": self.group, "layout": self.layout, "config": self.config}
        if self.tree is not None:
            options |= {"cu_seqlens": (0, *(span.hi for span in self.tree.spans)), "parents": self.tree.parents}
        if self.documents is None:
            yield given, options
            return
        present = [name for name in names if given.get(name) is not None]
        for row, offsets in enumerate(self.documents):
            yield given | {name: given[name][row : row + 1] for name in present}, options | {"cu_seqlens": offsets}


def convolution(real: Real, over: Sequence, given: Keywords) -> torch.Tensor:
    """Compute a causal convolution of hidden_states (batch, channels, local_seq) with weight (channels, width)."""

    def of_rows(row: Keywords, options: Keywords) -> torch.Tensor:
        def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
            out: torch.Tensor = real(**row | {"hidden_states": x})
            return out

        return dist_conv(run, row["hidden_states"], row["weight"].shape[-1], dim=2, **options)

    return torch.cat([of_rows(row, options) for row, options in over.rows(given, "hidden_states")])


def delta_rule(real: Real, over: Sequence, given: Keywords) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a delta rule whose states are (batch, heads, k_dim, v_dim): gated, or Kimi's with a gate per channel."""
    names = ("query", "key", "value", "g", "beta")

    def of_rows(row: Keywords, options: Keywords) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = {name: row.pop(name) for name in names}
        return dist_scan(fla_scan(real, keys="key", values="value", packs=False, **row), tokens, **options)

    return _joined([of_rows(dict(row), options) for row, options in over.rows(given, *names)])


def _state_space(scan: Callable[..., Any], real: Real, over: Sequence, given: Keywords) -> Any:
    """Compute the scan of Mamba-2, or the selective one of Mamba."""

    def of_rows(row: Keywords, options: Keywords) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = {"x": row.pop("hidden_states"), **{name: row.pop(name) for name in ("dt", "B", "C")}}
        found: tuple[torch.Tensor, torch.Tensor] = scan(real, tokens, row.pop("A"), **row, **options)
        return found

    rows = over.rows(given, "hidden_states", "dt", "B", "C", "z")
    out, state = _joined([of_rows(dict(row), options) for row, options in rows])
    return (out, state) if given.get("return_final_states") or given.get("return_last_state") else out


def _joined(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final state) of all rows."""
    out, state = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return out, state


STANDS_IN: dict[str, Callable[[Real, Sequence, Keywords], Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": partial(_state_space, dist_mamba2),
    "mamba_selective_scan": partial(_state_space, dist_mamba1),
}
"""What stands in for a function of transformers' modelling files, by its name there."""

FUSED = ("mamba2_split_conv1d_scan_combined",)
"""Functions that compute several of these at once, or return None where they cannot, as they do here."""
