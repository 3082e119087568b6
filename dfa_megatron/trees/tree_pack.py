"""A row of tokens in which shared prefixes stand once, and the way of numbers between it and its rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss import by_document
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.names import nearest
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.sharding import tree_positions

_COMBINING = ("sum", "mean")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreePack:
    """Hold rollouts that share prefixes, as one row of a batch on the CPU; `from_rollouts` makes it.

    A place of the row predicts the next token of its path. `labels` and `weights` stand at the predicting place.

    Attributes:
        tree: the segments, depth first; padding is a root of its own at the end.
        rollouts: the numbers of its rollouts among those given to `from_rollouts`.
        input_ids: int64 (1, tokens).
        labels: int64 (1, tokens), the next token; -100 where no rollout counts it.
        weights: float32 (1, tokens), how many rollouts count the next token.
    """

    tree: Tree
    rollouts: tuple[int, ...]
    input_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    _lengths: tuple[int, ...]
    """Tokens of each rollout."""
    _sources: torch.Tensor
    """int64, for all tokens of the rollouts one after another: the predicting place; behind the row if not counted."""

    @property
    def positions(self) -> torch.Tensor:
        """Return every token's place in its path, int64 (1, tokens), for position embeddings and RoPE."""
        return tree_positions(self.tree.lengths, self.tree.parents)[None]

    def for_transformers(self) -> dict[str, Any]:
        """Return the batch for a transformers model, whose labels are not shifted.

        The model's own loss counts a shared token once; `weights` or `by_rollout` give the sum over rollouts.
        """
        labels = F.pad(self.labels[:, :-1], (1, 0), value=IGNORED)
        return {"input_ids": self.input_ids, "labels": labels, "prompt_tree": (self.tree.lengths, self.tree.parents)}

    def for_megatron(self) -> dict[str, Any]:
        """Return the batch for `dfa_megatron.megatron.shard_batch`, with `weights` as its loss mask."""
        tokens = {"tokens": self.input_ids, "labels": self.labels, "loss_mask": self.weights}
        return tokens | {"position_ids": self.positions, "prompt_tree": (self.tree.lengths, self.tree.parents)}

    def tokens_of(self, values: Sequence[Any] | Mapping[int, Any], *, combine: Literal["sum", "mean"]) -> torch.Tensor:
        """Return numbers of the rollouts' tokens as a row (1, tokens), at the predicting places; 0 where none counts.

        Args:
            values: for each rollout, by its number, (tokens,) in its own order, or one number for all its tokens.
            combine: how the rollouts that count a shared token make one number of theirs. "sum" fits factors of a
                loss, such as advantages; "mean" fits what is the same but for rounding, such as old log-probabilities.

        Raises:
            UnsupportedError: combine has another name.
        """
        if combine not in _COMBINING:
            raise UnsupportedError(f"combine={combine!r}", "there is no such value", nearest(combine, _COMBINING))
        own = [torch.as_tensor(values[number]).reshape(-1) for number in self.rollouts]
        flat = torch.cat([numbers.expand(length) for numbers, length in zip(own, self._lengths, strict=True)])
        flat = flat if flat.is_floating_point() else flat.float()
        row = flat.new_zeros(self.tree.length + 1).index_add(0, self._sources.to(flat.device), flat)[None, :-1]
        return row / self.weights.to(row).clamp(min=1) if combine == "mean" else row

    def by_rollout(
        self, values: torch.Tensor, *, group: Group = None, layout: str | Layout = "contiguous"
    ) -> dict[int, torch.Tensor]:
        """Return numbers of the row's places as numbers of each rollout's tokens, by its number, on every rank.

        A collective call; gradients as of `unshard_sequence`: a loss that every rank computes alike from them needs
        gradients that are averaged over the ranks.

        Args:
            values: (..., local tokens) in this rank's order, such as the log-probabilities and entropies of
                `TokenScores`. Megatron's scores are (local tokens, batch): give their transpose.
            group, layout: as for `shard_sequence`; layout "zigzag" after Megatron's own slicing.

        Returns:
            (..., tokens of the rollout), each from the place that predicts the token; 0 for the first token, and where
            the rollout does not count it.
        """
        (whole,) = by_document(values, (0, self.tree.length), group=group, layout=layout)
        found = F.pad(whole, (0, 1)).index_select(-1, self._sources.to(whole.device)).split(self._lengths, dim=-1)
        return dict(zip(self.rollouts, found, strict=True))
