"""Heads exchanged for tokens inside Megatron's context-parallel group, asked for by its flag: trains like one rank."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.support.workers import run_ranks

ATTENTIONS = harness.LAYERS * harness.MICRO_BATCHES


def asked_for(flags: str, **changes: object) -> Case:
    """A case with the options of a command line."""
    args = add_dfa_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    return replace(case(**changes), options=options_of(args))  # type: ignore[arg-type]


@pytest.mark.support("megatron", "heads exchanged, CP 4 as 2 x 2")
@pytest.mark.parametrize(
    "topology", [Topology(cp=4), Topology(tp=2, cp=2)], ids=["cp4 as 2 x 2", "tp2 and cp2 as 2 x 1, one kv head a rank"]
)
def test_it_trains_like_one_rank(topology: Topology, reference: str) -> None:
    cases = [
        asked_for("--dfa-ulysses-degree 2 --dfa-data-layout contiguous", steps=2),
        asked_for("--dfa-ulysses-degree 2 --dfa-checkpoint auto", checkpoint="auto", steps=2),
        asked_for("--dfa-ulysses-degree 2 --dfa-data-layout zigzag", steps=2),
    ]
    # Two all-to-alls around a forward and two around a backward; recomputation repeats none.
    counts = {"attention_forwards": ATTENTIONS, "ulysses_exchanges": 4 * ATTENTIONS}
    wanted = [(one, counts) for one in cases]
    run_ranks(topology.ranks, harness.check_cases, topology, wanted, reference, timeout=170)
