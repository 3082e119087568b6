"""Random steps of transformers and DeepSpeed are those of one rank; `make fuzz-frameworks` draws more."""

from __future__ import annotations

import pytest

from tests.fuzz.frameworks.steps import check


@pytest.mark.parametrize("framework", ["transformers", "deepspeed"])
def test_random_steps_are_those_of_one_rank(framework: str) -> None:
    check(framework, 6)
