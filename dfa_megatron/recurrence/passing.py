"""The two exchanges of a recurrence, with exact gradients: states from rank to rank, and tokens before a convolution.

Forward and backward are one all-gather each. A recompute of a checkpointed region takes the result of its first pass,
so it sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.recurrence.agreed import Agreed, Place, agree_on
from dfa_megatron.recurrence.fold import Carry, fold, fold_back, gradient_of_m
from dfa_megatron.recurrence.share import Share
from dfa_megatron.remat import active_frame
from dfa_megatron.runtime.agreement.calls import at_layer, current_layer
from dfa_megatron.runtime.counters import COUNTERS

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(function: F) -> F:
    """Have Dynamo call a function as it stands, with one break of the graph."""
    called: F = torch.compiler.disable(function)
    return called


@outside_graphs
def pass_states(m: torch.Tensor, local: torch.Tensor, place: Place, *, matrix: bool) -> torch.Tensor:
    """Return the state that comes into this rank's tokens: the fold of (M, S_local) over the ranks before.

    Collective, also in the backward: the result must be part of what every rank differentiates.

    Args:
        m: M of this rank's tokens. matrix: (batch, heads, keys, keys), else it broadcasts against `local`. It may be
            anything on a rank whose first token starts a document, or inside of which one starts.
        local: the state after this rank's tokens if none comes in, (batch, heads, keys, values); of the last document.
        place: see `Place.of`.

    Returns:
        S_in like `local`, in float32 (float64 for float64): the state of the document that the first token continues,
        zero where it starts one.

    Raises:
        DisagreementError: the ranks ask for different exchanges, or run different calls.
    """
    dtype = accumulator_dtype(local.dtype)
    if not place.share.crosses:
        return torch.zeros_like(local, dtype=dtype)
    facts = {
        "state": str(tuple(local.shape)),
        "M": f"{tuple(m.shape)}, {'a matrix' if matrix else 'elementwise'}",
        "dtype": str(dtype),
        "gradient": str(torch.is_grad_enabled() and (m.requires_grad or local.requires_grad)),
    }
    return _kept(
        local,
        lambda known: _States.apply(  # type: ignore[no-untyped-call]
            m, local, agree_on("the states of a recurrence", place, facts, local.device), matrix, known
        ),
    )


@outside_graphs
def tokens_before(x: torch.Tensor, count: int, place: Place, *, dim: int = 1) -> torch.Tensor:
    """Return the `count` tokens before this rank's, zero where they belong to another document; collective.

    Several ranks bring them where a rank holds fewer. Gradients go back to the ranks that hold the tokens.

    Args:
        x: this rank's tokens along dimension `dim`.
        count: of tokens, at least 1: the width of a causal convolution less one.
        place: see `Place.of`.

    Returns:
        Like x, with `count` tokens.

    Raises:
        DisagreementError: as `pass_states`.
    """
    if not place.share.crosses:
        return torch.zeros_like(x.narrow(dim, 0, 1)).repeat_interleave(count, dim)
    facts = {
        "tokens before": str(count),
        "shape": str(tuple(x.shape)),
        "dtype": str(x.dtype),
        "gradient": str(torch.is_grad_enabled() and x.requires_grad),
    }
    return _kept(
        x,
        lambda known: _Before.apply(  # type: ignore[no-untyped-call]
            x, count, dim, agree_on("the tokens before a convolution", place, facts, x.device), known
        ),
    )


def _kept(x: torch.Tensor, run: Callable[[torch.Tensor | None], torch.Tensor]) -> torch.Tensor:
    """Run an exchange, or take its result from the frame of a checkpointed region."""
    frame = active_frame()
    if frame is not None and not frame.recording:
        COUNTERS.replays += 1
        return run(frame.take()[0])
    result = run(None)
    if frame is not None:
        frame.record(result, x.new_empty(0))
    return result


class _States(torch.autograd.Function):
    """Gather (M, S_local) and fold what came before; backward: gather (M, dS_in) and fold what came after."""

    @staticmethod
    def forward(
        ctx: Any, m: torch.Tensor, local: torch.Tensor, agreed: Agreed, matrix: bool, known: torch.Tensor | None
    ) -> torch.Tensor:
        share, dtype = agreed.share, accumulator_dtype(local.dtype)
        ctx.agreed, ctx.matrix, ctx.layer, ctx.dtypes = agreed, matrix, current_layer(), (m.dtype, local.dtype)
        wide = m.to(dtype)
        incoming = known
        if incoming is None:
            carries = _gather(agreed, 0, wide, local.to(dtype))
            with torch.autocast(local.device.type, enabled=False):
                folded = fold([carries[rank] for rank in share.before], matrix=matrix)
            incoming = torch.zeros_like(local, dtype=dtype) if folded is None else folded.clone()
        else:
            incoming = incoming.detach()
        ctx.save_for_backward(*((wide, incoming) if share.chains else ()))
        return incoming

    @staticmethod
    @differentiable_once("a recurrence over ranks", 0, 1)  # a rank's may depend on M of another
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None, None, None]:
        agreed: Agreed = ctx.agreed
        share, matrix = agreed.share, ctx.matrix
        m, incoming = ctx.saved_tensors if share.chains else (None, None)
        wide = gradient.to(accumulator_dtype(gradient.dtype))
        with at_layer(ctx.layer), torch.autocast(wide.device.type, enabled=False):
            carries = _gather(agreed, 1, m, wide)
            outgoing = fold_back([carries[rank] for rank in share.after], matrix=matrix)
            if outgoing is None:
                outgoing = torch.zeros_like(wide)
            of_m = None
            if m is not None and incoming is not None and share.before and share.keeps(share.rank):
                of_m = gradient_of_m(outgoing, incoming, m, matrix=matrix).to(ctx.dtypes[0])
        return of_m, outgoing.to(ctx.dtypes[1]), None, None, None


def _gather(agreed: Agreed, phase: int, m: torch.Tensor | None, state: torch.Tensor) -> list[Carry]:
    """Return (M, state) of every rank by one all-gather; M stays at home where no state passes through a rank."""
    if m is None or not agreed.share.chains:
        return [(None, theirs) for theirs in agreed.gather(phase, state)]
    both = agreed.gather(phase, torch.cat([m.reshape(-1), state.reshape(-1)]))
    return [(x[: m.numel()].view(m.shape), x[m.numel() :].view(state.shape)) for x in both]


class _Before(torch.autograd.Function):
    """Gather every rank's last tokens; backward: gather the gradients, and sum those of this rank's tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, count: int, dim: int, agreed: Agreed, known: torch.Tensor | None
    ) -> torch.Tensor:
        share = agreed.share
        ctx.agreed, ctx.dim, ctx.count, ctx.shape, ctx.layer = agreed, dim, count, x.shape, current_layer()
        if known is not None:
            return known.detach()
        most = min(count, share.tokens)
        tails = agreed.gather(0, x.narrow(dim, share.tokens - most, most).contiguous())
        return _last(tails[: share.rank], share.seen(share.rank, count), count, dim, tails[0])

    @staticmethod
    @differentiable_once("a convolution over ranks")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        agreed, dim, count = ctx.agreed, ctx.dim, ctx.count
        share: Share = agreed.share
        with at_layer(ctx.layer):
            everyone = agreed.gather(1, gradient.contiguous())
        total = gradient.new_zeros(ctx.shape, dtype=accumulator_dtype(gradient.dtype))
        for rank in range(share.rank + 1, share.ranks):
            # `seen` tokens end where the rank's own begin; those from `far` to `near` tokens before that are ours.
            seen = share.seen(rank, count)
            near = (rank - share.rank - 1) * share.tokens
            far = min(seen, near + share.tokens)
            if far > near:
                theirs = everyone[rank].narrow(dim, count - far, far - near)
                total.narrow(dim, share.tokens - (far - near), far - near).add_(theirs)
        return total.to(gradient.dtype), None, None, None, None


def _last(tails: list[torch.Tensor], seen: int, count: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Return the last `seen` tokens of the tails behind zeros, `count` together."""
    shape = list(like.shape)
    shape[dim] = count
    found = like.new_zeros(shape)
    if seen:
        before = torch.cat(tails, dim)
        found.narrow(dim, count - seen, seen).copy_(before.narrow(dim, before.shape[dim] - seen, seen))
    return found
