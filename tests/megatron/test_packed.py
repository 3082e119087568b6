"""Packed documents and sliding windows train like Megatron-Core's own attention on one rank, one document at a time."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.test_parity import check, expected
from tests.support.workers import run_ranks

EVERY_LAYER = (("window_size", (7, 0)),)
THREE_OF_FOUR = (("window_size", (21, 0)), ("window_attn_skip_freq", 4))
BY_LIST = (("window_size", (5, 0)), ("window_attn_skip_freq", [1, 0, 0, 1]))

REFERENCES: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    "window": {"config": EVERY_LAYER},
    "mixed": {"config": THREE_OF_FOUR},
    "packed-window": {"config": EVERY_LAYER, "packed": True},
    "packed-mixed": {"config": BY_LIST, "packed": True},
}
STEPS = 2


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Megatron's own attention on one rank, in each of these ways."""
    folder = tmp_path_factory.mktemp("packed")
    paths = {name: str(folder / f"{name}.pt") for name in REFERENCES}
    cases = [(paths[name], Case(options=None, steps=STEPS, **how)) for name, how in REFERENCES.items()]
    run_ranks(1, harness.save_references, cases, timeout=120)
    return paths


@pytest.mark.support("megatron", "windows; packed documents; both; CP 1, 2, 3")
@pytest.mark.parametrize("how", list(REFERENCES))
def test_context_parallel_ranks_train_like_one(how: str, references: dict[str, str]) -> None:
    ways = [("contiguous", "auto"), ("zigzag", "auto")]
    if how.startswith("packed"):
        ways.append(("boundary", "auto"))
    if how == "packed-mixed":
        ways.append(("contiguous", "none"))
    cases = [case(layout, checkpoint, steps=STEPS, **REFERENCES[how]) for layout, checkpoint in ways]
    check(Topology(cp=3), cases, references[how])


@pytest.mark.support("megatron", "windows; packed documents; both; CP 1, 2, 3")
def test_one_rank_trains_like_megatrons_own(references: dict[str, str]) -> None:
    cases = [(case("contiguous", "auto", steps=2, **how), name) for name, how in REFERENCES.items()]
    prepared = [(Topology(), wanted, expected(Topology(), wanted), references[name]) for wanted, name in cases]
    run_ranks(1, harness.check_topologies, prepared, timeout=120)


@pytest.mark.support("megatron", "packs in windows, TP 2 x CP 2 and PP 2 x CP 2")
@pytest.mark.parametrize("topology", [Topology(tp=2, cp=2), Topology(pp=2, cp=2)], ids=["tp2-cp2", "pp2-cp2"])
def test_packs_in_windows_train_with_other_parallelisms(topology: Topology, references: dict[str, str]) -> None:
    how = "packed-mixed"
    cases = [case(layout, "auto", steps=STEPS, **REFERENCES[how]) for layout in ("contiguous", "boundary")]
    check(topology, cases, references[how])


def test_packs_train_with_the_schedule_for_documents_and_with_heads_exchanged(references: dict[str, str]) -> None:
    options = MegatronConfig(schedule="greedy")
    check(Topology(cp=3), [Case(options, steps=STEPS, packed=True)], references["packed"])
    options = MegatronConfig(ulysses_degree=2)
    check(Topology(cp=4), [Case(options, steps=STEPS, **REFERENCES["packed-mixed"])], references["packed-mixed"])


def test_a_routers_loss_of_each_sample_is_refused_for_several_in_a_pack() -> None:
    from dfa_megatron.megatron.tokens.packed_documents import Pack, check_samples

    pack = Pack((0, 30, 48, 96))
    for kinds, sample, refused in (
        ("seq_aux_loss", 48, True), (["aux_loss", "seq_aux_loss"], 48, True),
        ("seq_aux_loss", 96, False), ("seq_aux_loss", None, False), ("aux_loss", 48, False),
    ):  # fmt: skip
        config, params = (
            SimpleNamespace(moe_router_load_balancing_type=kinds),
            SimpleNamespace(tokens_per_sample=sample),
        )
        with pytest.raises(UnsupportedError, match="2 samples in a pack") if refused else nullcontext():
            check_samples(config, params, pack)
