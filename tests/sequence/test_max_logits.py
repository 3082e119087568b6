"""The largest logits of every head, against dense scores: masks, windows, packs, layouts, and ranks without tokens."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from dfa_megatron import layouts, masks, max_logits
from dfa_megatron.doctor.dense import pairs_of
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.runtime.request import Request
from dfa_megatron.sequence import max_logits as module
from dfa_megatron.sharding import layout_of_tokens, positions_of
from tests.support.packs import random_offsets
from tests.support.workers import over_ranks, run_ranks


def dense(q: torch.Tensor, k: torch.Tensor, scale: float | None, softcap: float, **mask: Any) -> torch.Tensor:
    """From all scores of the sequence, in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    whole = mask["mask"] if "mask" in mask else Request(softmax_scale=1.0, **mask).mask_over(q.shape[1])
    seen = pairs_of(whole, q.shape[1], k.shape[1])
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys.double()) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3))


def uneven(length: int, ranks: int, draw: random.Random) -> Layout:
    """Give ranks runs of tokens of any length, in any order, and now and then none."""
    cuts = [0, *sorted(draw.randint(0, length) for _ in range(2 * ranks - 1)), length]
    chunks = [Span(lo, hi) for lo, hi in pairwise(cuts) if hi > lo]
    draw.shuffle(chunks)  # a rank's tokens need not be in order
    owners = [draw.randrange(ranks) for _ in chunks]
    return Layout(tuple(chunks), tuple(owners), ranks)


def asked(length: int, draw: random.Random) -> dict[str, Any]:
    """Ask for a mask."""
    window = draw.choice([(-1, -1), (draw.randint(0, 6), draw.randint(-1, 6))])
    lengths = draw.choice([[length], [3, length - 3], [1, 1, length - 2]])
    ways: list[dict[str, Any]] = [
        {"causal": draw.random() < 0.7, "window_size": window},
        {"causal": draw.random() < 0.5, "cu_seqlens": random_offsets(length, draw)},
        {"mask": masks.prefix_lm_documents(lengths, [min(2, x) for x in lengths])},
        {"mask": masks.global_sliding(length, 3, 2)},
        {"mask": masks.causal_blockwise(lengths)},
    ]
    return draw.choice(ways)


def compare(rank: int, ranks: int, draw: random.Random, device: str = "cpu") -> None:
    length = draw.choice([ranks * draw.randint(4, 9), draw.randint(4, 9 * ranks)])
    (heads, kv_heads), batch = draw.choice([(4, 2), (3, 1), (2, 2)]), draw.randint(1, 2)
    mask = asked(length, draw)
    name = draw.choice(["contiguous", "zigzag", *(["load_balanced"] if "cu_seqlens" in mask else [])])
    queries = keys = layout_of_tokens(name, length, ranks, mask.get("cu_seqlens"))
    layout: Layout | str = queries if "causal" in mask and "cu_seqlens" not in mask else name
    if draw.random() < 0.5:
        layout = queries = keys = uneven(length, ranks, draw)
    if "causal" in mask and "cu_seqlens" not in mask and draw.random() < 0.5:
        keys = uneven(draw.randint(1, 30), ranks, draw)
        layout, mask = layouts.cross(queries, keys), {"mask": masks.cross(length, keys.length, **mask)}
    dtype = draw.choice([torch.float64, torch.float32, torch.bfloat16])
    scale, softcap = draw.choice([None, 0.3]), draw.choice([0.0, 2.0])
    seed = torch.Generator().manual_seed(draw.randrange(1000))
    q = torch.randn(batch, length, heads, 8, generator=seed, dtype=torch.float64).to(dtype) - 0.5
    k = torch.randn(batch, keys.length, kv_heads, 8, generator=seed, dtype=torch.float64).to(dtype) - 0.5
    mine, theirs = positions_of(queries, rank), positions_of(keys, rank)
    here = q[:, mine].to(device).requires_grad_(), k[:, theirs].to(device)
    with torch.autocast(device, enabled=draw.random() < 0.5):
        got = max_logits(*here, softmax_scale=scale, softcap=softcap, layout=layout, **mask)
    assert (got.dtype, got.shape, got.requires_grad) == (torch.float32, (heads,), False)
    torch.testing.assert_close(got.double().cpu(), dense(q, k, scale, softcap, **mask), atol=0, rtol=3e-6)


def compare_rows(rank: int, ranks: int, draw: random.Random) -> None:
    """Documents, or masks, that differ from row to row."""
    length = draw.randint(4, 9 * ranks)
    name = draw.choice(["contiguous", "zigzag"])
    q, k = (torch.randn(2, length, n, 8, dtype=torch.float64) for n in (4, 2))
    offsets = [random_offsets(length, draw) for _ in range(2)]
    rows: list[dict[str, Any]] = [{"causal": True, "cu_seqlens": each} for each in offsets]
    asks: dict[str, Any] = {"causal": True, "cu_seqlens": offsets}
    if draw.random() < 0.5:
        rows = [{"mask": masks.causal(length)}, {"mask": masks.prefix_lm(length, 3)}]
        asks = {"mask": [row["mask"] for row in rows]}
    mine = positions_of(layout_of_tokens(name, length, ranks), rank)
    got = max_logits(q[:, mine], k[:, mine], layout=name, **asks)
    want = [dense(q[n : n + 1], k[n : n + 1], None, 0.0, **row) for n, row in enumerate(rows)]
    torch.testing.assert_close(got.double(), torch.maximum(*want), atol=0, rtol=3e-6)


@over_ranks(1, 5)
def test_the_largest_logits_are_those_of_the_dense_scores(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    module._SCORES = 1 << 10  # several tiles of a block
    for number in range(25):
        compare(rank, ranks, draw)
        if number % 5 == 0:
            torch.manual_seed(number)
            compare_rows(rank, ranks, draw)
    q = torch.ones(1, 4, 2, 8)
    if ranks > 1:
        with pytest.raises(DisagreementError):
            max_logits(q, q, causal=True, softcap=7.0 + rank)
        with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match="3 queries on rank 1"):
            max_logits(*(q[:, : 4 - (rank == 1)],) * 2, mask=masks.causal(4 * ranks), softcap=9.0)
    assert torch.equal(max_logits(q, q, causal=True), torch.full((2,), 8**0.5))


def _on_gpus(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(25):
        compare(rank, ranks, draw, "cuda")


@pytest.mark.gpu
def test_the_largest_logits_on_gpus() -> None:
    run_ranks(min(4, torch.cuda.device_count()), _on_gpus, cuda=True)
