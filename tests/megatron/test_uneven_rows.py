"""Parts of Megatron that take equal parts are refused for packs whose row the ranks do not divide."""

from __future__ import annotations

import pytest
import torch

from dfa_megatron.errors import UnsupportedError
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.support.workers import run_ranks


def refused(rank: int, world_size: int) -> None:
    from dfa_megatron.megatron.check_config import check_uneven

    row = like("packed", {"cp": 2}, batch=1, tokens=7)
    for changes, words in (
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "sequence_parallel"),
        ({"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}, "pipeline"),
        ({"num_moe_experts": 4, "expert_model_parallel_size": 2}, "expert parallelism"),
        ({}, "4 of them on rank 0"),
    ):
        config = harness.config_of(row)
        vars(config).update(changes)
        with pytest.raises(UnsupportedError, match=words):
            check_uneven(config, [5, 4], 5 if changes else 4, 0)
    harness.start(row)
    config = harness.config_of(row)
    model = harness.model_of(row, config)
    config.num_moe_experts, config.expert_model_parallel_size = 4, 2
    with pytest.raises(UnsupportedError, match="expert parallelism"):
        model(**harness.taken(next(harness.batches(row))))


def test_parts_of_megatron_that_take_equal_parts_are_refused() -> None:
    run_ranks(2, refused)
