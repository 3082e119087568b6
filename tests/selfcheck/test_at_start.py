"""`--dfa-selfcheck` runs once, before the model is made; its outcome is the same on every rank."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from dfa_megatron.errors import SelfCheckError, UnsupportedError
from dfa_megatron.megatron.selfcheck import at_start as of_megatron
from dfa_megatron.megatron.start import script
from dfa_megatron.selfcheck import at_start
from dfa_megatron.selfcheck.compare import Comparison, Difference
from dfa_megatron.selfcheck.run_case import Report
from dfa_megatron.testing.workers import run_ranks
from tests.selfcheck.test_megatron import FLAGS


def start_a_run(rank: int, world_size: int, flags: str) -> list[str]:
    """What a rank is told: of a right configuration, of one that cannot be checked, and of a difference."""
    asked, told = SimpleNamespace(dfa_selfcheck=True), []
    sys.argv = ["pretrain_gpt.py", *flags.split(), "--dfa-selfcheck"]
    of_megatron.check_if_asked(SimpleNamespace())
    assert not at_start._DONE, "it ran without being asked for"
    for _ in range(2):
        of_megatron.check_if_asked(asked)
    assert {"megatron"} == at_start._DONE
    at_start._DONE.clear()
    sys.argv += ["--optimizer", "muon"]
    with pytest.raises(UnsupportedError) as refused:
        of_megatron.check_if_asked(asked)
    told.append(str(refused.value))
    at_start._DONE.clear()
    del sys.argv[-2:]
    found = Comparison(differences=[Difference("plain", "gradients of q, k, v", "planted")])
    at_start.check = lambda case: Report(case, found)  # type: ignore[attr-defined]
    with pytest.raises(SelfCheckError) as differs:
        of_megatron.check_if_asked(asked)
    return [*told, str(differs.value)]


def test_a_spec_that_would_be_made_without_the_check_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="--dfa-selfcheck with --spec my"):
        script.prepare(["--spec", "my.module", "my_spec", "--dfa-selfcheck"])


def test_every_rank_is_told_the_outcome_before_training_starts() -> None:
    first, second = run_ranks(2, start_a_run, FLAGS, timeout=150)
    assert first == second
    refusal, table = first
    assert "--optimizer muon" in refusal
    assert "first difference: plain, gradients of q, k, v: planted" in table
