"""What the tables say: the best marked, ours against the others, and every reason once."""

from __future__ import annotations

from typing import Any

from benchmarks.attention.report import Row, line, tables


def row(method: str, kind: str, length: int, both: float, **more: Any) -> Row:
    fields = {"ranks": 4, "heads": 8, "kv_heads": 2, "head_dim": 64, "mask": "causal", "dtype": "bfloat16"}
    timed = {"state": "timed", "both_tflops": both, "forward_tflops": both / 2, "both_ms": 9.0, "forward_ms": 3.0}
    return Row(**fields | timed | {"method": method, "kind": kind, "seq_length": length} | more)


def test_the_fastest_of_each_length_is_marked_and_ours_is_divided_by_the_best_peer() -> None:
    rows = [
        row("ours", "ours", 8192, 600.0),
        row("theirs", "baseline", 8192, 500.0),
        row("slow", "baseline", 8192, 100.0),
        row("ours", "ours", 32768, 550.0),
        row("theirs", "baseline", 32768, 560.0),
        row("slow", "baseline", 32768, 0.0, state="wrong", why="dq is off"),
        row("without messages", "ablation", 32768, 999.0),
    ]
    text = tables(rows)
    title, *lines = text.splitlines()
    assert "TFLOP/s" in title
    assert [line.split() for line in lines[:6]] == [
        ["method", "8K", "32K", "GiB", "host", "ms"],
        ["ours", "600", "(300)*", "550", "(275)", "0.00"],
        ["theirs", "500", "(250)", "560", "(280)*", "0.00"],
        ["slow", "100", "(50)", "wrong", "0.00"],
        ["without", "messages", "999", "(500)", "0.00"],
        ["ours", "/", "best", "baseline", "1.200", "0.982"],
    ]
    assert "slow: wrong, dq is off" in text


def test_every_attention_has_a_table_and_a_reason_is_said_once() -> None:
    refused = {"state": "refused", "why": "it divides the heads"}
    rows = [row("theirs", "baseline", length, 0.0, kv_heads=n, **refused) for n in (8, 2) for length in (64, 128)]
    made = tables(rows).split("\n\n")
    assert [table.split(", ")[2] for table in made] == ["8 kv_heads of 64", "2 kv_heads of 64"]
    assert all(table.count("it divides the heads") == 1 for table in made)


def test_small_speeds_are_told_in_a_smaller_unit() -> None:
    title, _, line, *_ = tables([row("ours", "ours", 64, 0.0123)]).splitlines()
    assert "GFLOP/s" in title
    assert line.split()[1:3] == ["12.3", "(6.15)*"]


def test_a_line_tells_of_a_row() -> None:
    assert "refused: it divides" in line(row("theirs", "baseline", 64, 0.0, state="refused", why="it divides"))
    told = line(row("ours", "ours", 131072, 600.0, error=0.0031, peak_gib=5.3))
    assert " ".join(told.split()) == (
        "128K 8:2x64 causal ours forward 3.000 ms 300 TFLOP/s, both 9.000 ms 600 TFLOP/s, peak 5.30 GiB, error 3e-03"
    )
