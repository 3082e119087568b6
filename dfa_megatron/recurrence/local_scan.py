"""A rank's own pass of a recurrence: one run of the kernel finds the outputs, M and how a state to come is read.

The output is affine in the incoming state as the final state is: `out = out_local + R S_in`, with a row of R per token
and head. So the kernel runs once, with nothing coming in, and R S_in is added after the exchange. There are two ways
to find R and M:

closed    the decays multiply elementwise: R is the query times the decays since the piece's first token.
widened   the kernel runs on values [v, 0] from the state [0, identity]: its output is [out_local, R] and its final
          state [S_local, M]. Any recurrence that is linear in (state, values) allows it; this is for delta rules.

Only a rank's pieces up to the last that a state comes into are widened: without a tree that is the first one, where it
continues another rank's document. A state that comes from this rank's own pieces is read in the same way, so no call
of the kernel waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.recurrence.fold import Carry, apply, compose
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
        keys, values: names of tokens, (batch, tokens, any heads, key_dim) and (batch, tokens, heads, value_dim).
        packs: whether `run` takes documents in a batch of one; otherwise it is called for each of them with ().
        one_state: of several documents `run` returns the final state of the last alone, and takes none.
    """

    run: Run
    keys: str
    values: str
    packs: bool = False
    one_state: bool = False


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
        outs: for each of `share.runs`, (batch, tokens, heads, values) with no state coming in.
        reads: for each piece that a state comes into, what returns R S_in of its tokens.
        carries, matrix: as `passing.pass_states` takes them.
    """

    share: Share
    outs: list[torch.Tensor]
    reads: dict[int, Read]
    carries: dict[int, Carry]
    matrix: bool

    def finish(self, incoming: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, state after the last piece) with what `pass_states` returns; None where nothing crosses ranks.

        Each of them depends on it on every rank.
        """
        share, outs, last = self.share, list(self.outs), self.share.last
        brought = share.brought[share.rank]
        with torch.autocast(outs[0].device.type, enabled=False):
            after = {} if incoming is None else dict(zip(brought, incoming, strict=False))
            for piece, (m, state) in self.carries.items():
                if piece in after:  # of a rank without tokens, which passes it on
                    continue
                came = after.get(share.source[piece])
                after[piece] = state if came is None else apply(m.to(came.dtype), came, matrix=self.matrix) + state
            for at, (piece, *_) in enumerate(share.runs):
                if (before := share.before[piece]) >= 0:
                    outs[at] = outs[at] + self.reads[piece](after[before]).to(outs[at].dtype)
        out, final = torch.cat(outs, 1) if len(outs) > 1 else outs[0], after[last]
        if incoming is not None:
            out = out if brought and share.mine else _tied(out, incoming)
            final = final if share.mine and share.source[last] >= 0 else _tied(final, incoming)
        return out, final


def local_scan(scan: Scan, tokens: Tokens, share: Share, decay: Decay | None = None) -> Local:
    """Run the kernel once over this rank's tokens, with no state coming in; once for each piece if it takes no packs.

    Raises:
        UnsupportedError: tokens that do not belong together.
    """
    _check(tokens, scan, share)
    if not share.tokens:
        return _of_none(scan, tokens, share, decay)
    reads, carries, outs = dict[int, Read](), dict[int, Carry](), list[torch.Tensor]()
    mine, keys, values = share.mine, tokens[scan.keys].shape[-1], tokens[scan.values].shape[-1]
    plain = share.led[-1] + 1 if share.led and decay is None else mine.start
    for pieces in filter(None, (range(mine.start, plain), range(plain, mine.stop))):
        wide, runs = pieces.start < plain, [run for run in share.runs if run[0] in pieces]
        out, states = _run_pieces(scan, tokens, share, pieces, wide=wide)
        for run, part in zip(runs, out.split(share.lengths(runs), 1) if len(runs) > 1 else [out], strict=True):
            own, *read = part.split((values, keys), -1) if wide else [part]  # the backward of slices takes more passes
            outs.append(own)
            reads.update((run[0], partial(_read, x)) for x in read)
        for piece, state in states.items():
            m = state[..., values:] if wide else state.new_zeros(1).expand(*state.shape[:3], keys)
            carries[piece] = m, state[..., :values] if wide else state
    with torch.autocast(outs[0].device.type, enabled=False):
        if decay is not None:
            spans = [share.span(range(piece, piece + 1)) for piece in share.led] or [(0, 1)]
            closed = [_closed(decay, *span, accumulator_dtype(outs[0].dtype)) for span in spans]
            reads, ms = (dict(zip(share.led, found, strict=False)) for found in zip(*closed, strict=True))
            # Where nothing comes in, M only needs its shape.
            carries = {piece: (ms.get(piece, closed[0][1]), state) for piece, (_, state) in carries.items()}
        whole = compose(dict(sorted(carries.items())), share.before, matrix=decay is None)
    return Local(share, outs, reads, whole, decay is None)


def _of_none(scan: Scan, tokens: Tokens, share: Share, decay: Decay | None) -> Local:
    """Run the kernel on one token of zeros, so that shapes and gradients of parameters are those of other ranks."""

    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, zero_tokens(x, 1, 1)], 1)

    decay = decay and decay._replace(read=one(decay.read), log=one(decay.log))
    local = local_scan(scan, {name: one(x) for name, x in tokens.items()}, Share(0, (0, 1)), decay)
    return Local(share, [out[:, :0] for out in local.outs], {}, {share.last: local.carries[0]}, local.matrix)


def zero_tokens(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Return so many tokens of zeros along a dimension of tensors like x."""
    return x.new_zeros((*x.shape[:dim], count, *x.shape[dim + 1 :]))


def _run_pieces(
    scan: Scan, tokens: Tokens, share: Share, pieces: range, *, wide: bool
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return the outputs of these pieces with no state coming in, and the final states of those that are followed.

    wide: on values [v, 0] from the state [0, identity].
    """
    outs, states = list[torch.Tensor](), dict[int, torch.Tensor]()
    packs = scan.packs and tokens[scan.values].shape[0] == 1  # kernels take a pack as a batch of one
    for call in share.calls(pieces, packs=packs, one_state=scan.one_state):
        lo, hi = share.span(call)
        taken = dict(tokens) if hi - lo == share.tokens else {name: x[:, lo:hi] for name, x in tokens.items()}
        starts = _widened(scan, taken, len(call)) if wide else None
        first = call.start - share.mine.start
        offsets = share.pieces[first : first + len(call) + 1]
        out, found = scan.run(taken, starts, tuple(offset - lo for offset in offsets) if len(call) > 1 else ())
        outs.append(out)
        for piece in share.followed.intersection(call):
            row = len(found) - (call.stop - piece)
            states[piece] = found[row : row + 1] if len(call) > 1 else found
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0], states


def _widened(scan: Scan, taken: dict[str, torch.Tensor], documents: int) -> torch.Tensor:
    """Make the values of a kernel's arguments [v, 0], and return the states [0, identity] to begin with."""
    v, keys = taken[scan.values], taken[scan.keys].shape[-1]
    batch, _, heads, values = v.shape
    state = v.new_zeros((batch * documents, heads, keys, values + keys), dtype=accumulator_dtype(v.dtype))
    state[..., values:].diagonal(dim1=-2, dim2=-1).fill_(1)
    taken[scan.values] = torch.cat([v, v.new_zeros((*v.shape[:3], keys))], -1)
    return state


def _read(reads: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """Return R S_in (batch, tokens, heads, values), in the dtype of R as kernels multiply it."""
    return torch.einsum("bthk,bhkv->bthv", reads, incoming.to(reads.dtype))


def _closed(decay: Decay, lo: int, hi: int, dtype: torch.dtype) -> tuple[Read, torch.Tensor]:
    """Return how R of some tokens reads a state, and M after them, in float32 or float64."""
    since = decay.log[:, lo:hi].to(dtype).cumsum(1)
    since = since.unsqueeze(3) if since.dim() == 3 else since
    rate = since.new_ones(1, 1) if decay.rate is None else decay.rate.to(dtype)
    read = decay.read[:, lo:hi]
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
    zero = incoming[:0].sum().to(result.dtype)  # of no element: zero, also where a state is infinite
    # A product saves its factor, and a checkpoint recomputes, and sends, until it has all that was saved.
    return result + zero if zero.requires_grad else result * (1 + zero)
