"""Benchmarks over two ranks: what is checked, what is refused, what fails, and what is written whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import host_time, indexed, layers, packed, same_bits
from benchmarks.attention.__main__ import STUCK_STATUS, measure
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import Attention, Method, kernel_methods, local_attention, our_methods
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import ExecutionError, UnsupportedError
from tests.support.workers import over_ranks, run_ranks

JOB = Job(
    seq_length=(64, 128), heads=(2,), kv_heads=(1,), head_dim=16, dtype="float32", kernel=("reference",),
    schedule=("ring",), repetitions=2, seconds=0.0,
)  # fmt: skip


def changed(name: str, change: Any) -> Method:
    """Our attention with its q or its answer changed by change(out, local_seq)."""
    (ours,) = our_methods(JOB)

    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        attend = ours.start(problem, local_seq, world, stack)
        return lambda q, k, v: change(attend(q, k, v), local_seq)

    return Method(name, "baseline", start)


def alone(name: str, change: Any) -> Method:
    """A method in which no rank waits for another, changed as above."""

    def start(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        attend = local_attention("reference", problem, world.device)
        return lambda q, k, v: change(attend(q, k, v), local_seq)

    return Method(name, "baseline", start, exact=False)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())["rows"]
    return rows


def rows_of(job: Job, folder: Path, methods: list[Method]) -> list[dict[str, Any]]:
    """The rows of a run, which ends well, on every rank."""
    assert measure(replace(job, out=str(folder)), join("cpu"), methods) == 0
    dist.barrier()
    return rows_in(folder)


def by_length(rows: list[dict[str, Any]], method: str) -> dict[int, dict[str, Any]]:
    return {row["seq_length"]: row for row in rows if row["method"] == method}


@over_ranks(2)
def test_a_wrong_method_is_listed_and_never_timed(rank: int, ranks: int, tmp_path: Path) -> None:
    methods = [
        *our_methods(JOB),
        changed("a little off", lambda out, length: out * 1.001),
        changed("not a number", lambda out, length: out * (float("nan") if rank else 1.0)),
        changed("wrong gradients", lambda out, length: out.detach() + 0.9 * (out - out.detach())),
        changed("another shape", lambda out, length: out[:, 1:]),
    ]
    rows = rows_of(JOB, tmp_path, methods)
    ours = by_length(rows, "dfa ring reference")
    assert [row["state"] for row in ours.values()] == ["timed", "timed"]
    assert all(0 < row["error"] < 1e-5 and min(row["both_ms"], row["forward_ms"]) > 0 for row in ours.values())
    assert all(len(row["times"]["both"]) == 2 and row["sent_mib"] > 0 for row in ours.values())
    said = {
        "a little off": "out is off by 1.0e-03",
        "not a number": "out is off by nan",
        "wrong gradients": "dq is off by 1.0e-01",
        "another shape": "out has shape (1, ",
    }
    for name, why in said.items():
        for row in by_length(rows, name).values():
            assert row["state"] in ("wrong", "failed")
            assert why in row["why"]
            assert not row["both_ms"]
            assert not row["times"]
    table = (tmp_path / "tables.txt").read_text()
    assert "ours / best baseline" not in table
    assert "a little off: wrong, out is off by 1.0e-03" in table


@over_ranks(2)
def test_out_of_memory_is_a_row_and_longer_sequences_are_not_tried(rank: int, ranks: int, tmp_path: Path) -> None:
    tried = []

    def overflow(out: torch.Tensor, local_seq: int) -> torch.Tensor:
        if local_seq >= 64:
            tried.append(local_seq)
            raise ExecutionError("step 1 failed") from torch.OutOfMemoryError("no room")  # as the runtime tells it
        return out

    job = replace(JOB, seq_length=(64, 128, 256))
    rows = rows_of(job, tmp_path, [changed("greedy", overflow), *our_methods(JOB)])
    assert tried == [64]
    greedy = by_length(rows, "greedy")
    assert [row["state"] for row in greedy.values()] == ["timed", "out of memory", "out of memory"]
    assert "at 128 tokens" in greedy[256]["why"]
    assert {row["state"] for row in by_length(rows, "dfa ring reference").values()} == {"timed"}


def _one_fails(rank: int, ranks: int, folder: str) -> int:
    def stumble(out: torch.Tensor, local_seq: int) -> torch.Tensor:
        if local_seq >= 64 and rank == 1:
            raise torch.OutOfMemoryError("out of memory on this rank only")
        return out

    return measure(replace(JOB, out=folder), join("cpu"), [*our_methods(JOB), alone("uneven", stumble)])


def test_a_failure_of_one_rank_ends_the_run_with_all_rows_kept(tmp_path: Path) -> None:
    assert run_ranks(2, _one_fails, str(tmp_path)) == [STUCK_STATUS, STUCK_STATUS]
    rows = rows_in(tmp_path)
    assert [row["state"] for row in rows] == ["timed", "timed", "dropped", "dropped"]
    assert "rank 1 failed" in rows[2]["why"]


@over_ranks(2)
def test_refusals_say_why_and_a_budget_leaves_out_what_would_exceed_it(rank: int, ranks: int, tmp_path: Path) -> None:
    def refuse(problem: Problem, local_seq: int, world: World, stack: ExitStack) -> Attention:
        raise UnsupportedError("this", "it cannot", "that")

    job = replace(JOB, seq_length=(64, 66), schedule=("ring", "balanced"), mask=("full",))
    rows = rows_of(job, tmp_path, [*our_methods(job), Method("shy", "baseline", refuse)])
    states = {(row["method"], row["seq_length"]): (row["state"], row["why"]) for row in rows}
    assert states["dfa ring reference", 64] == ("timed", "")
    assert states["shy", 64] == ("refused", "this: it cannot")
    assert states["dfa balanced reference", 64][0] == "refused"
    assert "causal" in states["dfa balanced reference", 64][1]
    assert "do not divide" in states["dfa ring reference", 66][1]
    job = replace(JOB, seq_length=(64, 2**20), budget=4.0)  # the second would take minutes
    rows = rows_of(job, tmp_path, our_methods(job))
    assert [(row["seq_length"], row["state"]) for row in rows] == [(64, "timed"), (2**20, "dropped")]
    assert "budget of 4 s" in rows[1]["why"]


@over_ranks(1)
def test_one_rank_is_compared_with_the_bare_kernel(rank: int, ranks: int, tmp_path: Path) -> None:
    job = replace(JOB, seq_length=(64,), mask=("causal", "full"))
    rows = rows_of(job, tmp_path, [*our_methods(job), *kernel_methods(job)])
    assert [(row["mask"], row["kind"], row["state"]) for row in rows] == [
        (mask, kind, "timed") for mask in ("causal", "full") for kind in ("ours", "kernel")
    ]
    assert (tmp_path / "tables.txt").read_text().count("ours / bare kernel") == 2


def _other_benchmarks(rank: int, ranks: int, folder: str) -> None:
    few = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu"]
    sizes = ["--rows", "32", "--dtype", "float32", "--rounds", "1", "--calls", "2", "--kernel", "cpu"]
    host_time.main([*few, *sizes, "--out", f"{folder}/host.json"])
    packs = ["--tokens-per-rank", "96", "--check-tokens", "48", "--schedule", "auto", "load_balanced", "zigzag"]
    packed.main([*few, *packs, "--repetitions", "1", "--out", f"{folder}/packs.json"])
    trees = ["--masks", "causal documents", "tree 8 0.6", "--tokens", "512"]
    packed.main([*few, *trees, "--repetitions", "1", "--out", f"{folder}/masks.json"])
    short = ["--device", "cpu", "--tokens", "256", "--rounds", "1"]
    same_bits.main([*short, "--packs", "128", "--heads", "4:2", "--kernel", "cpu", "--out", f"{folder}/bits.json"])
    latent = ["--heads", "4", "--topk", "32", "--latent", "24", "--values", "16"]
    indexed.main([*short, *latent, "--out", f"{folder}/indexed.json"])
    narrow = ["--heads", "4:2", "--hidden", "64", "--ffn", "32", "--tokens", "32", "--layers", "2", "--repeats", "1"]
    layers.main(["--device", "cpu", *narrow, "--out", f"{folder}/layers.json"])


def test_other_benchmarks_measure_and_are_right(tmp_path: Path) -> None:
    run_ranks(2, _other_benchmarks, str(tmp_path))
    files = (tmp_path / f"{name}.json" for name in ("host", "packs", "masks", "bits", "indexed", "layers"))
    host, packs, trees, bits, chosen, in_a_row = (json.loads(file.read_text())["rows"] for file in files)
    assert [row["case"] for row in host] == ["function", "function, calls not compared", "empty function"]
    assert all(row["world"] == 2 and row["bound"] > 0 and row["unbound"] > 0 for row in host)
    assert [row["method"] for row in packs] == [f"dfa {name} auto auto" for name in ("auto", "load_balanced", "zigzag")]
    assert all(0 < row["error"] < 1e-5 and row["both ms"] > 0 and row["forward ms"] > 0 for row in packs)
    assert [row["mask"] for row in trees] == ["causal documents", "tree 8 0.6"]
    assert all(row["ms"] > 0 and row["took"] for row in trees)
    assert [row["way"] for row in bits] == [*same_bits.WAYS] * 2
    assert all(value > 0 for row in chosen for value in row.values())
    assert [row["documents"] > 1 for row in in_a_row] == [False, True]
    assert all(
        row["ms"][way] > row["host ms"][way] * 0.5 > 0 for row in in_a_row for way in ("ours", "ulysses", "share")
    )


def test_programs_of_ranks_that_are_not_there_are_timed(tmp_path: Path) -> None:
    few = ["--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--device", "cpu", "--kernel", "cpu", "--ranks", "2"]
    sizes = ["--rows", "32", "--dtype", "float32", "--rounds", "1", "--calls", "2"]
    host_time.main([*few, *sizes, "--out", str(tmp_path / "host.json")])
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert rows[0]["case"] == "program 2"
    assert all(row["bound"] > 0 for row in rows)


@pytest.mark.gpu(2, apart=True)
def test_two_gpus_run_the_command_with_the_baselines_of_pytorch(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.attention", "--ranks", "2", "--seq-length", "4096")
    flags = ("--heads", "8", "--kv-heads", "8", "2", "--kernel", "cudnn", "aten", "--baselines", "pytorch", "ulysses")
    done = subprocess.run(
        [*command, *flags, "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path)
    assert {row["state"] for row in rows} == {"timed"}, [row["why"] for row in rows]
    assert all(row["peak_gib"] > row["inputs_gib"] > 0 for row in rows)
