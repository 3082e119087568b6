"""What a dashboard gets: counts and times since the last call, and one line that says how attention runs."""

from __future__ import annotations

import contextlib
import io
import random
import time

import pytest
import torch

from dfa_megatron import DistAttentionConfig, dist_flash_attn_func, dist_flash_attn_varlen_func, layouts, stats
from dfa_megatron.names import LAYOUTS
from dfa_megatron.runtime import counters
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.sharding import layout_of_tokens
from tests.support.workers import over_ranks


def call(rows: int, **options: object) -> None:
    q = torch.randn(1, rows, 2, 8, requires_grad=True)
    dist_flash_attn_func(q, q, q, causal=True, config=DistAttentionConfig(**options)).sum().backward()


@over_ranks(2, 3)
def test_stats_count_what_ran_since_and_find_a_rank_that_waits(rank: int, world_size: int) -> None:
    stats()
    for number in range(2 * counters.EVERY):
        if rank == 0 and number % counters.EVERY == 2:
            time.sleep(0.2)  # the others' third call waits for this rank's keys
        call(8, schedule="ring", ulysses_degree=1, verify="off")
    found = stats()
    assert found["dfa/forwards"] == found["dfa/backwards"] == 2 * counters.EVERY
    assert (found["dfa/schedule"], found["dfa/kernel"], found["dfa/transport"]) == ("ring", "cpu", "gloo")
    assert found["dfa/forward_ms"] > 0 < found["dfa/backward_ms"]
    assert found["dfa/tflops"] > 0
    # Keys and values of 8 tokens, 2 heads of 8 float32 go round; gradients come home.
    sent = 2 * 8 * 2 * 8 * 4 * (world_size - 1)
    assert found["dfa/sent_mib"] * 2**20 >= 2 * counters.EVERY * sent
    if rank:
        assert found["dfa/waiting_percent"] > 50
    assert Transport.mark is None
    again = stats()
    assert "dfa/forward_ms" not in again
    assert again["dfa/forwards"] == 0


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


def test_a_time_counts_the_waits_between_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, clock = counters._Stopwatch(torch.device("cpu")), iter([1.0, 1.5, 2.0, 2.5, 4.5, 5.0])
    monkeypatch.setattr(counters.time, "perf_counter", lambda: next(clock))
    for _ in range(6):
        watch.mark()
    assert watch.milliseconds() == (4000.0, 2500.0)
