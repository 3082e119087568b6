"""Layers with a config of their own, some without attention or MLP, train like one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron import distribute_attention
from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.support import megatron_model as small_model
from tests.support.workers import run_ranks


def block(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    plain = {"no_op": False, "replace_with_linear": False}
    return {
        "attention": {**plain, "n_heads_in_group": None, **attention},
        "ffn": {**plain, "ffn_mult": None, "intermediate_size": None, **ffn},
    }


BLOCKS = [
    block({"no_op": True}, {"intermediate_size": 96}),
    block({"n_heads_in_group": 2}, {"intermediate_size": 128}),
    block({"replace_with_linear": True}, {"no_op": True}),
    block({"n_heads_in_group": 4}, {"replace_with_linear": True}),
]
BLOCKS_FLAG = (
    ("heterogeneous_layers_config_encoded_json", json.dumps({"block_configs": BLOCKS})),
    ("heterogeneous_block_specs", True),
)


@pytest.mark.support("megatron", "heterogeneous layers; PP 2 x CP 2 in layouts `contiguous` and `boundary`")
def test_layers_of_different_kinds_train_like_one_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "heterogeneous.pt")
    run_ranks(1, harness.save_reference, path, Case(options=None, steps=1, config=BLOCKS_FLAG))
    counts = {"attention_forwards": harness.MICRO_BATCHES, "replays": harness.MICRO_BATCHES}
    cases = [case(layout, "auto", steps=1, config=BLOCKS_FLAG) for layout in ("contiguous", "boundary")]
    run_ranks(4, harness.check_topologies, [(Topology(pp=2, cp=2), wanted, counts, path) for wanted in cases])


def without_the_config(rank: int, world_size: int) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    harness.start(Topology())
    config = harness.make_config(Topology(), case(recompute=("uniform", 1), config=BLOCKS_FLAG))
    spec = distribute_attention(small_model.megatrons_spec(config), config=MegatronConfig())
    with pytest.raises(UnsupportedError, match="each have a config of their own"):
        GPTModel(config, spec, harness.VOCABULARY, harness.SEQUENCE)


def test_full_recomputation_must_be_taken_over_on_the_models_config() -> None:
    run_ranks(1, without_the_config)
