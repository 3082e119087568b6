"""The functions that recurrent layers of transformers call, over a sequence that is spread over ranks.

Each takes the function that it stands in for and that call's arguments by name, and runs it on this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import silu, softplus

from dfa_megatron.config import TrainingConfig
from dfa_megatron.huggingface.positions.document_starts import Documents
from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.recurrence import Decay, Place, Scan, dist_conv, dist_scan, pass_states
from dfa_megatron.runtime.cu_seqlens import Offsets

Keywords = dict[str, Any]
Real = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Hold what a layer computes over.

    layer: its number, from 1, for messages.
    documents: token offsets of every row, in the sequence of all ranks; None if each row is one document.
    """

    layer: int
    group: str
    config: TrainingConfig
    documents: Documents | None

    def rows(self, given: Keywords, *names: str) -> Iterator[tuple[Keywords, dict[str, Any]]]:
        """Yield the arguments, with those named cut to rows that share documents, and options of a recurrence.

        Arguments that are missing or None are left as they are.
        """
        options: dict[str, Any] = {"group": self.group, "config": self.config}
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


def delta_rule(real: Real, over: Sequence, given: Keywords) -> tuple[torch.Tensor, None]:
    """Compute a delta rule whose states are (batch, heads, k_dim, v_dim): gated, or Kimi's with a gate per channel."""
    names = ("query", "key", "value", "g", "beta")

    def of_rows(row: Keywords, options: Keywords) -> torch.Tensor:
        def run(x: Keywords, state: torch.Tensor | None, documents: Offsets) -> tuple[torch.Tensor, torch.Tensor]:
            out, last = real(**row | x | {"initial_state": state, "output_final_state": True})
            return out, last

        return dist_scan(Scan(run, "key", "value"), {name: row[name] for name in names}, **options)[0]

    return torch.cat([of_rows(row, options) for row, options in over.rows(given, *names)]), None


def mamba2(real: Real, over: Sequence, given: Keywords) -> torch.Tensor:
    """Compute Mamba-2's scan, whose states (batch, heads, head_dim, state) decay by a number per head."""
    names = ("hidden_states", "dt", "B", "C")

    def of_rows(row: Keywords, options: Keywords) -> torch.Tensor:
        def run(x: Keywords, state: torch.Tensor | None, documents: Offsets) -> tuple[torch.Tensor, torch.Tensor]:
            out, last = real(**row | x | {"return_final_states": True})
            return out, last.transpose(2, 3)

        low, high = row.get("dt_limit", (0.0, float("inf")))
        decay = Decay(row["C"], row["A"].float() * _steps(row, "dt_bias", "dt_softplus").clamp(low, high).float())
        scan = Scan(run, "B", "hidden_states")
        return dist_scan(scan, {name: row[name] for name in names}, decay=decay, **options)[0]

    return torch.cat([of_rows(row, options) for row, options in over.rows(given, *names)])


def mamba(real: Real, over: Sequence, given: Keywords) -> torch.Tensor:
    """Compute Mamba's selective scan of (batch, channels, local_seq), whose states are (batch, channels, state).

    The function takes no state, so what the state adds to the outputs of a document's later part is added here.
    """
    names = ("hidden_states", "dt", "B", "C", "z")

    def of_rows(row: Keywords, options: Keywords) -> torch.Tensor:
        place = Place.of(row["hidden_states"], 2, options["group"], options.get("cu_seqlens"), options["config"])
        parts, last = [], None
        for lo, hi in pairwise(place.share.pieces):
            cut = {name: row[name][..., lo:hi] for name in names if row.get(name) is not None}
            out, last = real(**row | cut | {"return_last_state": True})
            parts.append(out)
        first = {name: row[name][..., : parts[0].shape[-1]] for name in names if row.get(name) is not None}
        log = row["A"].float()[:, None] * _steps(row | first, "delta_bias", "delta_softplus").float()[..., None]
        decay = log.cumsum(2).exp()  # (batch, channels, tokens of the first piece, state)
        assert last is not None
        state = pass_states(decay[:, :, -1, :, None], last[..., None], place, matrix=False)
        added = torch.einsum("bctn,bnt,bcn->bct", decay, first["C"].to(state.dtype), state[..., 0])
        gate = silu(first["z"]) if "z" in first else 1.0
        return torch.cat([parts[0] + (added * gate).to(parts[0].dtype), *parts[1:]], -1)

    return torch.cat([of_rows(row, options) for row, options in over.rows(given, *names)])


def _steps(given: Keywords, bias: str, softplus_of: str) -> torch.Tensor:
    """Return the sizes of a state space's steps: dt, with its bias and softplus if the call asks for them.

    In float32, as kernels compute them: over many tokens the rounding of each would add up.
    """
    dt: torch.Tensor = given["dt"]
    dt = dt.to(accumulator_dtype(dt.dtype))
    if (added := given.get(bias)) is not None:
        dt = dt + added.to(dt.dtype).view(-1, *(1 for _ in range(dt.dim() - 2 if bias == "delta_bias" else 0)))
    return softplus(dt) if given.get(softplus_of) else dt


STANDS_IN: dict[str, Callable[[Real, Sequence, Keywords], Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}
"""What stands in for a function of transformers' modelling files, by its name there."""

FUSED = ("mamba2_split_conv1d_scan_combined",)
"""Functions that compute several of these at once, or return None where they cannot, as they do here."""
