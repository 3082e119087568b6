"""torch_dist checkpoints go from distributed attention to Megatron's own and back, and to another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.support.workers import run_ranks

HALF, WHOLE = 2, 4
MEGATRONS = Case(options=None, steps=WHOLE, optimizer="megatron")


def ours(layout: str) -> Case:
    return case(layout, "auto", steps=WHOLE, optimizer="megatron")


def first_half(rank: int, world_size: int, wanted: Case, folder: str) -> None:
    topology = Topology(cp=world_size)
    harness.start(topology)
    harness.train(topology, replace(wanted, steps=HALF), save=folder)


def second_half(rank: int, world_size: int, wanted: Case, folder: str) -> list[float]:
    topology = Topology(cp=world_size)
    harness.start(topology)
    return harness.train(topology, wanted, load=folder, first_step=HALF).losses


def uninterrupted(rank: int, world_size: int) -> list[float]:
    harness.start(Topology())
    return harness.train(Topology(), MEGATRONS).losses


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Those of one rank that was not interrupted."""
    (found,) = run_ranks(1, uninterrupted)
    return found  # type: ignore[no-any-return]


def inventory(rank: int, world_size: int, folder: str) -> dict[str, tuple[int, ...]]:
    from megatron.core import dist_checkpointing

    harness.start(Topology())
    return {key: tuple(part.global_shape) for key, part in dist_checkpointing.load_tensors_metadata(folder).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints after the first half: of Megatron's own attention on one rank, and of ours on two."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    run_ranks(1, first_half, MEGATRONS, str(folder / "megatrons"))
    run_ranks(2, first_half, ours("contiguous"), str(folder / "ours"))
    return {"megatrons": str(folder / "megatrons"), "ours": str(folder / "ours")}


@pytest.mark.support("megatron", "checkpoints to and from Megatron's own attention")
def test_checkpoints_of_both_hold_the_same_tensors(folders: dict[str, str]) -> None:
    (theirs,) = run_ranks(1, inventory, folders["megatrons"])
    (mine,) = run_ranks(1, inventory, folders["ours"])
    assert mine == theirs
    assert any("core_attention" not in key and "self_attention" in key for key in mine)


@pytest.mark.support("megatron", "checkpoints to and from Megatron's own attention")
@pytest.mark.parametrize(
    ("source", "ranks", "wanted"),
    [
        ("ours", 1, MEGATRONS),
        ("megatrons", 2, ours("boundary")),
        ("ours", 3, ours("contiguous")),
        ("ours", 1, ours("contiguous")),
    ],
    ids=["from ours to Megatron's", "from Megatron's to ours", "from two ranks to three", "from two ranks to one"],
)
def test_training_goes_on_as_if_it_had_not_been_interrupted(
    folders: dict[str, str], losses: list[float], source: str, ranks: int, wanted: Case
) -> None:
    for resumed in run_ranks(ranks, second_half, wanted, folders[source]):
        assert len(resumed) == WHOLE - HALF
        for loss, on_one_rank in zip(resumed, losses[HALF:], strict=True):
            assert abs(loss - on_one_rank) <= 1e-4
