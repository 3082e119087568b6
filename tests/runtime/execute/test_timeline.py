"""A real run beside its simulation: the same calls and messages on every rank, in a file that browsers read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import dfa_megatron
from benchmarks.attention.ablation import ablation
from dfa_megatron.cli.main import main
from dfa_megatron.doctor import recording as timeline
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.testing.dense import assert_close
from dfa_megatron.testing.workers import run_ranks
from tests.support.cases import case


def test_what_was_recorded_is_what_was_simulated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json"
    command = ["trace", "--device", "cpu", "--ranks", "3"]
    sizes = ["--seq-length", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--schedule", "balanced"]
    assert main([*command, *sizes, "--out", str(out)]) == 0
    said = capfd.readouterr().out
    assert said.count("simulated") == said.count("measured") == 2
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert sorted(names.values()) == sorted(f"rank {r}, {k}" for r in range(3) for k in ("simulated", "measured"))
    seen: dict[str, Counter[tuple[object, ...]]] = {name: Counter() for name in names.values()}
    for event in events:
        if event["ph"] == "X" and "wait" not in event["cat"]:
            assert event["dur"] >= 0
            arguments = event["args"]
            seen[names[event["pid"]]][event["cat"], event["name"], arguments["step"], arguments.get("peer")] += 1
    for rank in range(3):
        assert seen[f"rank {rank}, simulated"] == seen[f"rank {rank}, measured"]


def test_nothing_is_recorded_outside() -> None:
    with timeline.record() as recording:
        pass
    q = torch.randn(1, 8, 2, 16)
    dfa_megatron.dist_flash_attn_func(q, q, q, causal=True)
    assert recording.spans == []
    with timeline.record() as recording:
        dfa_megatron.dist_flash_attn_func(q, q, q, causal=True)
    assert [span[0] for span in recording.spans] == ["compute"]


def _ablations(rank: int, ranks: int) -> None:
    whole = case(ranks * 8)
    shard = [x[:, rank * 8 : rank * 8 + 8] for x in whole.inputs]
    with ablation("no_overlap"):
        assert_close(
            dfa_megatron.dist_flash_attn_func(*shard, causal=True),
            whole.out[:, rank * 8 : rank * 8 + 8],
            tolerance=1e-12,
        )
    with ablation("no_communication"):
        out = dfa_megatron.dist_flash_attn_func(*shard, causal=True)
    assert rank == 0 or not torch.allclose(out, whole.out[:, rank * 8 : rank * 8 + 8])
    assert_close(
        dfa_megatron.dist_flash_attn_func(*shard, causal=True), whole.out[:, rank * 8 : rank * 8 + 8], tolerance=1e-12
    )


def test_without_overlap_results_are_right_and_without_communication_they_are_not() -> None:
    run_ranks(3, _ablations)


def test_an_unknown_ablation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no_communication"), ablation("no_balance"):  # type: ignore[arg-type]
        pass
