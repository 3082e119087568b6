"""A plan run over lists of tensors: the whole algorithm on a page, without slots, streams, messages and kernels.

All ranks are in one process. Every rank has a dictionary of chunks, and a block is dense attention. The rules are in
`dfa_megatron.plan.language.ir`; the runtime runs the same plans.

Shapes are those of `dist_flash_attn_func`, except that lse is (batch, rows, heads, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dfa_megatron.plan.language.ir import AttentionPlan, Block, Plan, chunk_of

Value = tuple[torch.Tensor, ...]
"""The tensors of one name, of the rows of one chunk.

Forward: q; kv = (k, v); out = (out, lse). Backward: qdo = (q, dout, lse, delta); dq; dkv = (dk, dv).
The runtime holds -delta.
"""

Held = dict[tuple[int, str, int], Value]
"""(rank, name, chunk) -> the value that the rank holds."""

Shards = Sequence[torch.Tensor]
"""One tensor per rank, of the tokens that it holds in the plan's layout."""


def forward(plan: AttentionPlan, q: Shards, k: Shards, v: Shards, scale: float) -> list[Value]:
    """Return (out, lse) of every rank."""
    phase = plan.forward
    inputs = _cut(phase, q=(q,), kv=(k, v))
    nothing = [x.new_zeros(*x.shape[:3], v[0].shape[3]) for x in q]
    sums = _cut(phase, out=(nothing, [torch.full_like(x[..., :1], -torch.inf) for x in q]))

    def attend(rank: int, block: Block) -> list[Value]:
        (queries,), (keys, values) = inputs[rank, "q", block.q_chunk], inputs[rank, "kv", block.kv_chunk]
        scores = _scores(phase, block, queries, keys, scale)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.einsum("bqhgk,bkhd->bqhgd", (scores - lse).exp().nan_to_num(0.0), values)
        return [(out.flatten(2, 3), lse.flatten(2, 3))]

    _run(phase, inputs, sums, attend, merge)
    return [_join(phase, sums, rank, "out") for rank in range(plan.ranks)]


def backward(
    plan: AttentionPlan, dout: Shards, q: Shards, k: Shards, v: Shards, results: Sequence[Value], scale: float
) -> list[Value]:
    """Return (dq, dk, dv) of every rank; `results` are those of `forward`."""
    phase, lse = plan.backward, [lse for _, lse in results]
    delta = [(given * out).sum(-1, keepdim=True) for given, (out, _) in zip(dout, results, strict=True)]
    inputs = _cut(phase, qdo=(q, dout, lse, delta), kv=(k, v))
    sums = _cut(phase, dq=([x * 0 for x in q],), dkv=([x * 0 for x in k], [x * 0 for x in v]))

    def differentiate(rank: int, block: Block) -> list[Value]:
        q_side, (keys, values) = inputs[rank, "qdo", block.q_chunk], inputs[rank, "kv", block.kv_chunk]
        queries, dout, lse, delta = (x.unflatten(2, (keys.shape[2], -1)) for x in q_side)
        scores = _scores(phase, block, q_side[0], keys, scale)
        weights = (scores - lse).exp().where(scores > -torch.inf, 0.0)
        dscores = weights * (torch.einsum("bqhgd,bkhd->bqhgk", dout, values) - delta) * scale
        dq = torch.einsum("bqhgk,bkhd->bqhgd", dscores, keys).flatten(2, 3)
        dk = torch.einsum("bqhgk,bqhgd->bkhd", dscores, queries)
        return [(dq,), (dk, torch.einsum("bqhgk,bqhgd->bkhd", weights, dout))]

    _run(phase, inputs, sums, differentiate, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)))
    return [(*_join(phase, sums, rank, "dq"), *_join(phase, sums, rank, "dkv")) for rank in range(plan.ranks)]


def merge(one: Value, other: Value) -> Value:
    """Merge (out, lse) of the same queries over different keys."""
    (out, lse), (out_other, lse_other) = one, other
    total = torch.logaddexp(lse, lse_other)
    share, share_other = ((x - total).exp().nan_to_num(0.0) for x in (lse, lse_other))
    return share * out + share_other * out_other, total


def _run(
    plan: Plan,
    inputs: Held,
    sums: Held,
    compute: Callable[[int, Block], list[Value]],
    add: Callable[[Value, Value], Value],
) -> None:
    """Run all steps of all ranks. A result goes on from rank to rank; an input stays where it was as well."""

    def put(key: tuple[int, str, int], value: Value) -> None:
        sums[key] = add(sums[key], value) if key in sums else value

    for step in range(plan.steps):
        moves = [(t, sums if t.what in plan.phase.write_names else inputs) for t in plan.transfers if t.step == step]
        wire = [(held.pop if held is sums else held.__getitem__)((t.src, t.what, t.chunk)) for t, held in moves]
        for block in (block for block in plan.blocks if block.step == step):
            for (side, name), value in zip(plan.phase.writes, compute(block.rank, block), strict=True):
                put((block.rank, name, chunk_of(block, side)), value)
        for (t, held), value in zip(moves, wire, strict=True):
            if held is sums:
                put((t.dst, t.what, t.chunk), value)
            else:
                inputs[t.dst, t.what, t.chunk] = value


def _scores(plan: Plan, block: Block, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scores (batch, queries, kv_heads, group, keys), -inf where the mask has no pair."""
    rows, keys = (plan.layout.chunks[chunk] for chunk in (block.q_chunk, block.kv_chunk))
    i, j = torch.arange(rows.lo, rows.hi)[:, None], torch.arange(keys.lo, keys.hi)
    sees = torch.zeros(len(rows), len(keys), dtype=torch.bool)
    for t in plan.tiles(block):
        inside = (t.q.lo <= i) & (i < t.q.hi) & (t.kv.lo <= j) & (j < t.kv.hi)
        sees |= inside & (j - i >= t.lo) & (j - i <= t.hi)
    scores = torch.einsum("bqhgd,bkhd->bqhgk", q.unflatten(2, (k.shape[2], -1)), k) * scale
    return scores.masked_fill(~sees[:, None, None, :], -torch.inf)


def _cut(plan: Plan, **names: Sequence[Shards]) -> Held:
    """Cut every rank's tensors of each name into its chunks."""
    return {
        (rank, name, chunk): tuple(shards[rank][:, row : row + len(plan.layout.chunks[chunk])] for shards in tensors)
        for name, tensors in names.items()
        for rank in range(plan.ranks)
        for chunk, row in plan.layout.offsets(plan.layout.of(rank)).items()
    }


def _join(plan: Plan, sums: Held, rank: int, name: str) -> Value:
    """Join a rank's own chunks again."""
    chunks = [sums[rank, name, chunk] for chunk in plan.layout.of(rank)]
    return tuple(torch.cat(tensors, 1) for tensors in zip(*chunks, strict=True))
