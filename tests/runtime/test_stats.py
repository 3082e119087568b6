"""What a dashboard gets: counts since the last call, and one line that says how attention runs."""

from __future__ import annotations

import contextlib
import io
import random

import pytest
import torch

from dfa_megatron import DistAttentionConfig, dist_flash_attn_func, dist_flash_attn_varlen_func, layouts, stats
from dfa_megatron.names import LAYOUTS
from dfa_megatron.runtime import counters
from dfa_megatron.sharding import layout_of_tokens
from tests.support.workers import over_ranks


def call(rows: int, **options: object) -> None:
    q = torch.randn(1, rows, 2, 8, requires_grad=True)
    dist_flash_attn_func(q, q, q, causal=True, config=DistAttentionConfig(**options)).sum().backward()


@over_ranks(2, 3)
def test_stats_count_what_ran_since_the_last_call(rank: int, world_size: int) -> None:
    stats()
    for _ in range(3):
        call(8, schedule="ring", ulysses_degree=1, verify="off")
    found = stats()
    assert found["dfa/forwards"] == found["dfa/backwards"] == 3
    assert (found["dfa/schedule"], found["dfa/kernel"], found["dfa/transport"]) == ("ring", "cpu", "gloo")
    # Keys and values of 8 tokens, 2 heads of 8 float32 go round; gradients come home.
    sent = 2 * 8 * 2 * 8 * 4 * (world_size - 1)
    assert found["dfa/sent_mib"] * 2**20 >= 3 * sent
    assert stats()["dfa/forwards"] == 0


def test_the_line_says_how_a_new_attention_runs_and_stands_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_said", set())
    for rows in (11, 12, 11):
        call(rows)
    assert capfd.readouterr().err.splitlines() == ["dfa: 1 rank, contiguous, cpu"]
    call(13, kernel="reference")
    assert capfd.readouterr().err.splitlines() == ["dfa: 1 rank, contiguous, reference"]
    monkeypatch.setenv(counters.QUIET, "1")
    call(14, schedule="ring", kernel="aten" if torch.cuda.is_available() else "cpu")
    assert capfd.readouterr().err == ""


@over_ranks(3)
def test_no_line_says_how_long_packs_and_parts_are(rank: int, ranks: int) -> None:
    torch.manual_seed(rank)
    draw = random.Random(ranks)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for number in range(12):
            length = draw.randint(ranks, 40)
            layout = draw.choice([layouts.contiguous(length, ranks), layouts.zigzag(length, ranks)])
            given = layout if number % 2 else "load_balanced"
            x = torch.randn(layout_of_tokens(given, length, ranks, (0, length)).tokens(rank), 2, 8)
            dist_flash_attn_varlen_func(x, x, x, (0, length), causal=True, layout=given)
    lines = said.getvalue().splitlines()
    assert {line.split(", ")[1] for line in lines} <= {"chunks", *LAYOUTS}
    assert len(lines) <= (0 if rank else 8), "each layout, with a schedule or two"
