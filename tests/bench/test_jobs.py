"""What flags, presets and defaults come to, and how much work a job says it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.attention.__main__ import job_of, main
from benchmarks.attention.clock import repetitions
from benchmarks.attention.job import Job, head_pairs
from dfa_megatron.errors import UnsupportedError


def test_the_grid_preset_is_the_one_that_targets_are_given_for() -> None:
    job = job_of(["--preset", "grid"])
    assert job.seq_length == (8192, 32768, 65536, 131072, 524288)
    assert head_pairs(job.heads, job.kv_heads) == ((32, 32), (32, 8), (32, 1), (33, 33), (2, 2))
    assert (job.head_dim, job.mask) == (128, ("causal",))
    assert {problem.dtype for problem in replace(job, device="cuda").problems} == {"bfloat16"}


def test_a_flag_goes_before_its_preset_and_the_preset_before_the_default() -> None:
    job = job_of(["--device", "cpu", "--preset", "quick", "--seq-length", "64", "--kernel", "cpu", "reference"])
    assert job.seq_length == (64,)
    assert head_pairs(job.heads, job.kv_heads) == ((32, 32), (32, 8))
    assert (job.kernel, job.schedule, job.problems[0].dtype) == (("cpu", "reference"), ("auto",), "float32")


def test_heads_that_are_given_do_not_meet_the_kv_heads_of_a_preset() -> None:
    job = job_of(["--preset", "grid", "--heads", "6"])
    assert head_pairs(job.heads, job.kv_heads) == ((6, 6),)


def test_heads_are_paired_where_there_are_as_many_and_combined_otherwise() -> None:
    assert head_pairs((32, 33), (8, 33)) == ((32, 8), (33, 33))
    assert head_pairs((32,), (8, 1)) == ((32, 8), (32, 1))
    assert head_pairs((6, 4), ()) == ((6, 6), (4, 4))
    with pytest.raises(UnsupportedError, match="33 heads with 8"):
        head_pairs((32, 33), (8, 8))


def test_short_sequences_come_first_because_long_ones_may_run_out_of_memory() -> None:
    job = Job(seq_length=(512, 128, 512), heads=(4,), kv_heads=(4, 2))
    assert [(length, problem.kv_heads) for problem, length in job.cells] == [(128, 4), (128, 2), (512, 4), (512, 2)]


def test_calls_are_repeated_until_some_time_is_spent_and_long_ones_three_times() -> None:
    assert repetitions(10.0, least=5, seconds=0.3) == 30
    assert repetitions(200.0, least=5, seconds=0.3) == 5
    assert repetitions(5000.0, least=5, seconds=0.3) == 3
    assert repetitions(5000.0, least=2, seconds=0.3) == 2
    assert repetitions(0.1, least=5, seconds=0.3) == 50


@pytest.mark.parametrize(
    "flags",
    ["baselines nobody", "mask diagonal", "schedule fast", "transport pigeon", "ablation all", "preset everything"],
)
def test_unknown_names_are_refused_with_those_that_there_are(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        job_of(f"--{flags}".split())
    assert "choose from" in capsys.readouterr().err


def test_what_cannot_be_served_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--device", "cpu", "--heads", "33", "--kv-heads", "8"]) == 2
    assert "Not supported: 33 heads with 8 kv_heads" in capsys.readouterr().err
    assert main(["--device", "cuda"]) == 2
    assert "no GPU" in capsys.readouterr().err
