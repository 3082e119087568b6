"""The two exchanges of a recurrence, with exact gradients: states from rank to rank, and tokens before a convolution.

States travel in one all-gather each way, tokens in one all-to-all. A recompute of a checkpointed region takes what its
first pass has kept, so it sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, repeat
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once, outside_graphs
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import short_name
from dfa_megatron.recurrence.fold import Carry, fold, fold_back, gradient_of_m
from dfa_megatron.recurrence.local_scan import zero_tokens
from dfa_megatron.recurrence.share import Parents, Share, edges_of
from dfa_megatron.remat import active_frame
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import Compared, compared, facts_of_tokens, telling
from dfa_megatron.runtime.comm.groups import Group
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets, describe, offsets_of
from dfa_megatron.runtime.execute.moves import Moves, move_rows, moves_between
from dfa_megatron.runtime.request import DEFAULTS


@lru_cache(maxsize=64)  # the same object for the layers of a pack: it keeps what it finds
def _share(place: tuple[int, int], tokens: int, layout: Layout | str, offsets: Offsets, parents: Parents) -> Share:
    """Return the share of a rank of so many, which has these tokens."""
    share = Share(place[0], edges_of(layout, tokens, place[1], offsets), offsets, parents)
    if share.tokens != tokens:
        what = f"{tokens} tokens on rank {share.rank} of a sequence that gives it {share.tokens}"
        why = f"the ranks hold {share.edges[-1]} tokens together: {share.held}"
        raise UnsupportedError(what, why, "layout=, the number of tokens of every rank")
    return share


@dataclass(frozen=True)
class Agreed(Compared):
    """An exchange of states or tokens that all ranks of a share make."""

    share: Share = field(kw_only=True)

    def running(self, phase: int, device: torch.device, nbytes: int = 0) -> AbstractContextManager[None]:
        """Count and compare what runs inside, as `Compared.running` does."""
        COUNTERS.state_exchanges += 1
        if phase:
            COUNTERS.state_backward_bytes += nbytes
        else:
            COUNTERS.state_forward_bytes += nbytes
        return super().running(phase, device)

    def gather(self, phase: int, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return every rank's tensors as one, by rank, in the forward (0) or the backward (1); collective.

        Raises:
            DisagreementError: the ranks run different calls; the message is a table.
        """
        assert self.over is not None, "a share that crosses ranks"
        with self.running(phase, parts[0].device, sum(x.nbytes for x in parts)):
            mine = torch.cat([x.reshape(-1) for x in parts])
            return [x.view(mine.dtype) for x in self.over.gather(mine.view(torch.uint8))]  # which all backends support


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in a sequence. over: None for one rank."""

    over: Channel | None
    share: Share

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        dim: int,
        group: Group,
        cu_seqlens: CuSeqlens,
        parents: Sequence[int] | None = None,
        *,
        layout: Layout | str = "contiguous",
        config: DistAttentionConfig = DEFAULTS,
    ) -> Place:
        """Return the place of tokens, which lie along dimension `dim` of x.

        Args:
            group, layout: as for `dist_scan`.
            cu_seqlens: global token offsets of packed documents; None for sequences that are one document.
            parents: of the documents, the segments of a prompt tree; None for no tree.
            config: its verify is used; its numerics must be "fastest".

        Raises:
            UnsupportedError: cu_seqlens or parents do not fit the tokens, this process is not in the group, or an
                order is asked for that states cannot keep.
        """
        with telling(group, config) as over:
            if config.numerics == "invariant":
                why = "states pass from rank to rank, where they end decides the last bits"
                raise UnsupportedError("a layer with states and numerics='invariant'", why, "numerics='fastest'")
            rank, ranks = (0, 1) if over is None else (over.rank, over.size)
            offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
            above = () if parents is None or max(parents, default=-1) < 0 else tuple(parents)
            return cls(over, _share((rank, ranks), x.shape[dim], layout, offsets, above))

    def agree_on(self, what: str, facts: dict[str, str], device: torch.device) -> Agreed:
        """Return the exchange of that description; ranks compare it when it is new. Collective.

        Documents are compared at each call by their digest, so that a new pack costs no round of its own.

        Raises:
            DisagreementError: the ranks ask for different exchanges; the message is a table.
        """
        share = self.share
        facts = {"tokens of a rank": share.held, **facts}
        varying = [describe(share.offsets)] if share.offsets else []
        varying += [f"parents {short_name(share.parents)}"] if share.parents else []
        found = compared(what, self.over, facts, device, *varying)
        return Agreed(found.over, found.phases, found.layer, share=share)


@outside_graphs
def pass_states(carries: Mapping[int, Carry], place: Place, *, matrix: bool) -> torch.Tensor:
    """Return the states of earlier ranks that come into this rank's pieces: folds of (M, S_local) along their paths.

    Collective, also in the backward: the result must be part of what every rank differentiates.

    Args:
        carries: (M, S_local) of `share.last` and of this rank's pieces whose states others need, by number: from the
            state that comes from another rank, over all pieces between. matrix: M is (batch, heads, keys, keys), else
            it broadcasts against S_local (batch, heads, keys, values). Where no state comes in it may be anything.
        place: see `Place.of`.

    Returns:
        For each piece of `share.brought`, or one of zeros for none, its final state like S_local, in float32 (float64
        for float64).

    Raises:
        DisagreementError: the ranks ask for different exchanges, or run different calls.
    """
    share = place.share
    flat = [x for piece in share.sent[share.rank] or (share.last,) for x in carries[piece]]
    m, local = flat[:2]
    facts = {
        "state": str(tuple(local.shape)),
        "M": f"{tuple(m.shape)}, {'a matrix' if matrix else 'elementwise'}",
        "dtype": str(accumulator_dtype(local.dtype)),
        "gradient": str(torch.is_grad_enabled() and (m.requires_grad or local.requires_grad)),
    }
    return _kept(
        local,
        lambda known: _States.apply(  # type: ignore[no-untyped-call]
            place.agree_on("the states of a recurrence", facts, local.device), matrix, known, *flat
        ),
    )


@outside_graphs
def tokens_before(x: torch.Tensor, count: int, place: Place, *, dim: int = 1) -> torch.Tensor:
    """Return the `count` tokens before each piece of `share.leads` on its path, zeros before a root; collective.

    They may be of several pieces and ranks. Gradients go back to the ranks that hold the tokens.

    Args:
        x: this rank's tokens along dimension `dim`.
        count: of tokens, at least 1: the width of a causal convolution less one.
        place: see `Place.of`.

    Returns:
        Like x, with `count` tokens for each of these pieces.

    Raises:
        DisagreementError: as `pass_states`.
    """
    reach = place.share.reach(count)
    own, rows = _on(reach.own, x.device), _on(reach.rows, x.device)
    found = [zero_tokens(x, 1, dim), x.index_select(dim, own)]
    if any(reach.brings):
        facts = {"tokens before": str(count), **facts_of_tokens(x, dim)}
        exchange = place.agree_on("the tokens before a convolution", facts, x.device)
        moves = _moves(place.share, count, x.device)
        found.append(_kept(x, lambda known: move_rows(x, moves, exchange, dim=dim, known=known)))
    # Siblings read the same tokens: their gradients are summed in float32.
    return torch.cat(found, dim).to(accumulator_dtype(x.dtype)).index_select(dim, rows).to(x.dtype)


def _kept(x: torch.Tensor, run: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor:
    """Run an exchange, or take its result from the frame of a checkpointed region."""
    frame = active_frame()
    if frame is not None and not frame.recording:
        COUNTERS.reused += 1
        return run(frame.take()[0])
    result = run(None)
    if frame is not None:
        frame.record(result, x.new_empty(0))
    return result


class _States(torch.autograd.Function):
    """Gather (M, S_local) and fold what came before; backward: gather M and the gradients, and fold what came after."""

    @staticmethod
    def forward(
        ctx: Any, agreed: Agreed, matrix: bool, known: torch.Tensor | None, *flat: torch.Tensor
    ) -> torch.Tensor:
        share, dtype = agreed.share, accumulator_dtype(flat[1].dtype)
        ctx.agreed, ctx.matrix, ctx.dtypes = agreed, matrix, [x.dtype for x in flat]
        ms, states = ([x.to(dtype) for x in some] for some in (flat[::2], flat[1::2]))
        if known is not None:
            incoming = known.detach()
        else:
            gathered = _gather(agreed, 0, ms, states, max(map(len, share.sent)))
            carries = {
                piece: (m, state)
                for pieces, (all_m, all_states) in zip(share.sent, gathered, strict=True)
                for piece, m, state in zip(pieces, all_m or repeat(None), all_states, strict=False)
            }
            brought = share.brought[share.rank]
            with torch.autocast(states[0].device.type, enabled=False):
                folded = fold(carries, share.source, brought, matrix=matrix)
            incoming = torch.stack([folded[piece] for piece in brought] or [torch.zeros_like(states[0])])
        # Something on every rank: what is saved makes a checkpoint recompute, and send, before the backward sends.
        ctx.save_for_backward(incoming, *(ms if share.chains else []))
        return incoming

    @staticmethod
    @differentiable_once("a recurrence over ranks", 3, 4)  # a rank's may depend on M of another
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        agreed: Agreed = ctx.agreed
        share, matrix = agreed.share, ctx.matrix
        incoming, *ms = ctx.saved_tensors
        wide = gradient.to(accumulator_dtype(gradient.dtype))
        maps, read = dict[int, torch.Tensor | None](), dict[int, torch.Tensor]()
        with torch.autocast(wide.device.type, enabled=False):
            gathered = _gather(agreed, 1, ms, [*wide], max(map(len, share.brought)))
            for rank, (all_m, gradients) in enumerate(gathered):
                maps |= zip(share.sent[rank], all_m or repeat(None), strict=False)
                for piece, one in zip(share.brought[rank], gradients, strict=False):
                    read[piece] = read[piece] + one if piece in read else one
            outgoing = fold_back(maps, read, share.source, share.sent[share.rank], matrix=matrix)
            found: list[torch.Tensor | None] = []
            for at, piece in enumerate(share.sent[share.rank]):
                source, of_m = share.source[piece], None
                if source >= 0 and share.chains:
                    came = incoming[share.brought[share.rank].index(source)]
                    of_m = gradient_of_m(outgoing[piece], came, ms[at], matrix=matrix).to(ctx.dtypes[2 * at])
                found += [of_m, outgoing[piece].to(ctx.dtypes[2 * at + 1])]
        return None, None, None, *(found or [None, torch.zeros_like(wide[0]).to(ctx.dtypes[1])])


def _gather(
    agreed: Agreed, phase: int, ms: list[torch.Tensor], states: list[torch.Tensor], most: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return (M, states) of every rank, filled up to one number, by one all-gather; M stays at home if none chains."""
    slots = max(map(len, agreed.share.sent)) if agreed.share.chains else 0
    parts = [
        *(ms[:slots] + [torch.zeros_like(x) for x in ms[:1]] * (slots - len(ms))),
        *(states + [torch.zeros_like(states[0])] * (most - len(states))),
    ]
    sizes = [x.numel() for x in parts]
    found = []
    for theirs in agreed.gather(phase, parts):
        views = [y.view(x.shape) for x, y in zip(parts, theirs.split(sizes), strict=True)]
        found.append((views[:slots], views[slots:]))
    return found


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may keep it for a backward
def _moves(share: Share, count: int, device: torch.device) -> Moves:
    """Return the moves of the tokens that ranks need of others."""
    held = [[Span(lo, hi)] for lo, hi in pairwise(share.edges)]
    wanted = [[Span(token, token + 1) for token in tokens] for tokens in share.reach(count).brings]
    return moves_between(held, wanted, share.rank, device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # training may save it for a backward
def _on(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int64 numbers on a device, the same tensor for all layers."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)
