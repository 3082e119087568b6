"""Multi-token prediction: its tokens and labels shift across ranks, and not across documents."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.support.megatron_model import DenseAttention, megatrons_spec
from tests.support.workers import run_ranks


def open_rolls(rank: int, ranks: int) -> None:
    """Call the replaced roll_tensor as every release does; a newer one asks for no sum, or for what nobody knows."""
    from dfa_megatron.megatron.layers.prediction import rolling
    from dfa_megatron.megatron.tokens.visit import Exchange, Visit, running

    seen: list[Any] = []

    def megatrons(tensor: Any, shifts: int, dims: int, cp_group: Any, packed_seq_params: Any, **others: Any) -> Any:
        seen.append(others)
        return tensor, tensor.sum()

    group: Any = dist.group.WORLD
    roll, tokens = rolling(megatrons), torch.ones(1, 4)
    for others in ({}, {"return_sum": False}, {"return_sum": True, "new_argument": 7}):
        roll(tokens, -1, -1, group, None, **others)  # outside a distributed model
        assert seen[-1:] == [others]
    with running(Visit(None, group, "contiguous", "contiguous", None, (1, 4), Exchange(group))):
        assert roll(tokens, cp_group=group, return_sum=False)[1] is None
        assert roll(tokens, cp_group=group, return_sum=True)[1] is not None
        with pytest.raises(UnsupportedError, match="roll_tensor with new_argument"):
            roll(tokens, cp_group=group, new_argument=7)


def scripts_predictions(rank: int, ranks: int) -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    from dfa_megatron.megatron import DistributedAttentionLayer
    from dfa_megatron.megatron.script import script_specs

    row = like("plain", {"cp": ranks})
    harness.start(row)
    for _ in range(2):  # the second time replaces nothing
        script_specs._distribute_predictions()
    config = harness.config_of(row, mtp_num_layers=1)
    block = gpt_layer_specs.get_gpt_mtp_block_spec(config, megatrons_spec(config), use_transformer_engine=False)
    parts = vars(block.layer_specs[0].submodules)
    inner = parts.get("transformer_layer") or parts["mtp_model_layer"]
    assert issubclass(inner.module, DistributedAttentionLayer)


def other_attention(rank: int, ranks: int) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    row = like("ahead", {"cp": ranks})
    harness.start(row)
    config = harness.config_of(row, mtp_num_layers=1)
    layer = megatrons_spec(config)
    layer.submodules.self_attention.submodules.core_attention = DenseAttention
    own = TransformerBlockSubmodules(layer_specs=[layer])
    block = get_gpt_mtp_block_spec(config, own, use_transformer_engine=False)
    with patch.object(harness, "predictions", lambda *_: block):
        model = harness.model_of(row, config)
    with pytest.raises(UnsupportedError, match=r"own attention in a distributed model, in layout 'contiguous'"):
        model(**harness.taken(next(harness.batches(row))))


def each(rank: int, ranks: int) -> None:
    for check in (open_rolls, other_attention, scripts_predictions):
        check(rank, ranks)


def test_rolls_of_newer_releases_layers_with_another_attention_and_those_of_megatrons_default_spec() -> None:
    """Taken and passed on, refused where tokens are in order, and distributed by a spec of flags."""
    run_ranks(2, each)
