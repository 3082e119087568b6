"""Random steps of Megatron-Core over 2 to 4 ranks are those of one rank; `make fuzz-frameworks` draws more."""

from __future__ import annotations

from tests.fuzz.frameworks.steps import check


def test_random_steps_are_those_of_one_rank() -> None:
    check("megatron", 12)
