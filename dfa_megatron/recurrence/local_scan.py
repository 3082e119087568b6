"""A rank's own pass of a recurrence: one run of the kernel finds the outputs, M and how a state to come is read.

The output is affine in the incoming state as the final state is: `out = out_local + R S_in`, with a row of R per token
and head. So the kernel runs once, with nothing coming in, and R S_in is added after the exchange. There are two ways
to find R and M:

closed    the decays multiply elementwise: R is the query times the decays since the rank's first token.
widened   the kernel runs on values [v, 0] from the state [0, identity]: its output is [out_local, R] and its final
          state [S_local, M]. Any recurrence that is linear in (state, values) allows it; this is for delta rules.

Only the first piece of a rank's tokens, where it continues another rank's document, is widened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.kernels.leaf import differentiable_once
from dfa_megatron.recurrence.fold import apply
from dfa_megatron.recurrence.share import Share
from dfa_megatron.runtime.cu_seqlens import Offsets

Tokens = Mapping[str, torch.Tensor]
"""The kernel's arguments that have tokens along dimension 1, by name."""

Read = Callable[[torch.Tensor], torch.Tensor]

Run = Callable[[dict[str, torch.Tensor], torch.Tensor | None, Offsets], tuple[torch.Tensor, torch.Tensor]]
"""The kernel: (tokens, initial state or None for zero, local offsets of documents or ()) -> (out, final states).

out (batch, tokens, heads, values); states (batch, heads, keys, values), or one for each document in place of batch.
Both are linear in (initial state, values) together.
"""


@dataclass(frozen=True, slots=True)
class Scan:
    """A kernel that takes and returns states.

    Attributes:
        run: see `Run`.
        keys, values: the names of those tokens; keys (batch, tokens, any heads, key_dim), values (batch, tokens, heads,
            value_dim).
        packs: whether `run` takes documents in a batch of one; otherwise it is called for each of them with ().
    """

    run: Run
    keys: str
    values: str
    packs: bool = False


class Decay(NamedTuple):
    """What the closed way needs: the recurrence is S = decay S + k v, out = read S.

    Attributes:
        read: the query with all its scales, (batch, tokens, heads or a divisor, keys).
        log: the logarithm of each token's decay, (batch, tokens, heads), or (batch, tokens, heads, keys) per key.
        rate: where given, that logarithm is log (batch, tokens, heads) times rate (heads, 1 or keys): the step size and
            A of a state space.
    """

    read: torch.Tensor
    log: torch.Tensor
    rate: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Local:
    """What a rank knows before the exchange.

    Attributes:
        out: (batch, tokens, heads, values), with no state coming in.
        read: returns R S_in of the first piece's tokens (batch, some tokens, heads, values); None where none comes in.
        m, matrix, state: as `passing.pass_states` takes them.
        passes: whether a state that comes in goes out again.
    """

    out: torch.Tensor
    read: Read | None
    m: torch.Tensor
    state: torch.Tensor
    matrix: bool
    passes: bool

    def finish(self, incoming: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, final state) with the state that came in; each of them depends on it on every rank."""
        if self.read is None:
            return _tied(self.out, incoming), _tied(self.state, incoming)
        with torch.autocast(self.out.device.type, enabled=False):
            seen = self.read(incoming).to(self.out.dtype)
            first, rest = self.out[:, : seen.shape[1]] + seen, self.out[:, seen.shape[1] :]
            if self.passes:
                final = apply(self.m.to(incoming.dtype), incoming, matrix=self.matrix) + self.state
            else:
                final = _tied(self.state, incoming)
        return torch.cat([first, rest], 1) if rest.shape[1] else first, final


def local_scan(scan: Scan, tokens: Tokens, share: Share, decay: Decay | None = None) -> Local:
    """Run the kernel once over this rank's tokens, with no state coming in.

    Raises:
        UnsupportedError: tokens that do not belong together.
    """
    _check(tokens, scan, share)
    pieces, first = share.pieces, share.pieces[1]
    comes, passes = share.continues(share.rank), share.continues(share.rank) and share.keeps(share.rank)
    keys, (batch, _, heads, values) = tokens[scan.keys].shape[-1], tokens[scan.values].shape
    if decay is not None:
        out, state = _run_pieces(scan, tokens, pieces)
        with torch.autocast(out.device.type, enabled=False):
            read, m = _closed(decay, first, heads, accumulator_dtype(state.dtype))
        return Local(out, read if comes else None, m, state, matrix=False, passes=passes)
    if not comes:
        out, state = _run_pieces(scan, tokens, pieces)
        nothing = state.new_zeros(batch, heads, keys, keys, dtype=accumulator_dtype(state.dtype))
        return Local(out, None, nothing, state, matrix=True, passes=False)
    wide, state = scan.run(*_widened(scan, tokens, first))
    (out, reads), (state, m) = (x.split([values, keys], -1) for x in (wide, state))
    if len(pieces) > 2:
        rest = {name: x[:, first:] for name, x in tokens.items()}
        out_rest, state = _run_pieces(scan, rest, tuple(offset - first for offset in pieces[1:]))
        out = torch.cat([out, out_rest], 1)
    return Local(out, partial(_read, reads), m, state, matrix=True, passes=passes)


def _run_pieces(scan: Scan, tokens: Tokens, pieces: Offsets) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final state of the last piece) of documents of which none has a state coming in."""
    if len(pieces) == 2:
        return scan.run(dict(tokens), None, ())
    if scan.packs and tokens[scan.values].shape[0] == 1:  # kernels take a pack as a batch of one
        out, states = scan.run(dict(tokens), None, pieces)
        return out, states[-1:]
    found = [scan.run({name: x[:, lo:hi] for name, x in tokens.items()}, None, ()) for lo, hi in pairwise(pieces)]
    return torch.cat([out for out, _ in found], 1), found[-1][1]


def _widened(scan: Scan, tokens: Tokens, first: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, Offsets]:
    """Return the kernel's arguments for values [v, 0] from the state [0, identity], over the first tokens."""
    taken = {name: x[:, :first] for name, x in tokens.items()}
    v, keys = taken[scan.values], taken[scan.keys].shape[-1]
    batch, _, heads, values = v.shape
    state = v.new_zeros((batch, heads, keys, values + keys), dtype=accumulator_dtype(v.dtype))
    state[..., values:].diagonal(dim1=-2, dim2=-1).fill_(1)
    taken[scan.values] = torch.cat([v, v.new_zeros((*v.shape[:3], keys))], -1)
    return taken, state, ()


def _read(reads: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """Return R S_in (batch, tokens, heads, values), in the dtype of R as kernels multiply it."""
    return torch.einsum("bthk,bhkv->bthv", reads, incoming.to(reads.dtype))


def _closed(decay: Decay, first: int, heads: int, dtype: torch.dtype) -> tuple[Read, torch.Tensor]:
    """Return how R of the first tokens reads a state, and M after them, in float32 or float64."""
    since = decay.log[:, :first].to(dtype).cumsum(1)
    since = since.unsqueeze(3) if since.dim() == 3 else since
    rate = since.new_ones(1, 1) if decay.rate is None else decay.rate.to(dtype)
    read = decay.read[:, :first]
    return partial(_read_decayed, read, since, rate), (since[:, -1] * rate).exp().unsqueeze(3)


def _read_decayed(read: torch.Tensor, since: torch.Tensor, rate: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """Return R S_in in chunks of tokens: R has every head's keys, and is made again in the backward."""
    batch, heads, keys, _ = incoming.shape
    size = max(1, _CHUNK // (batch * heads * keys))
    parts = zip(read.split(size, 1), since.split(size, 1), strict=True)
    found = [
        checkpoint(_read_chunk, *part, rate, incoming, use_reentrant=False, preserve_rng_state=False) for part in parts
    ]
    return torch.cat(found, 1)


_CHUNK = 1 << 26
"""Elements of R in a chunk: 256 MiB."""


def _read_chunk(read: torch.Tensor, since: torch.Tensor, rate: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    heads, dtype = incoming.shape[1], read.dtype
    wide = read.to(since.dtype).repeat_interleave(heads // read.shape[2], 2) * (since * rate).exp()
    return _read(wide.to(dtype), incoming)


def _check(tokens: Tokens, scan: Scan, share: Share) -> None:
    """Refuse tokens of several lengths, and tokens without the named ones."""
    for name in (scan.keys, scan.values):
        if name not in tokens:
            what = f"a recurrence over tokens named {', '.join(sorted(tokens))}"
            raise UnsupportedError(what, f"there is no {name!r} among them", "a Scan that names them")
    lengths = {name: x.shape[1] for name, x in tokens.items()}
    if set(lengths.values()) != {share.tokens}:
        why = f"this rank has {share.tokens} tokens"
        raise UnsupportedError(f"lengths {lengths} along dimension 1", why, "tensors with tokens along dimension 1")


def _tied(result: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """Return a result, and have its backward reach the exchange although nothing came in: the other ranks wait."""
    tied: torch.Tensor = _Tie.apply(result, incoming)  # type: ignore[no-untyped-call]
    return tied


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(incoming)
        return result.view_as(result)

    @staticmethod
    @differentiable_once("a recurrence over ranks")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.zeros_like(ctx.saved_tensors[0])
