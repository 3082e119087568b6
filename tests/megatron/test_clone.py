"""What a patched Megatron-LM clone calls: distributed attention where --cp-comm-type dfa asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from dfa_megatron.megatron import DistributedAttentionLayer
from dfa_megatron.megatron.start import clone
from tests.megatron.harness import Topology, case, make_config, megatrons_spec


def config(comm_type: Any) -> Any:
    made = make_config(Topology(), case())
    made.cp_comm_type = comm_type
    return made


@pytest.mark.parametrize("comm_type", [None, "p2p", "a2a", ["p2p", "dfa"], []])
def test_without_the_flag_everything_stays_megatrons(comm_type: Any) -> None:
    spec = megatrons_spec(config(comm_type))
    assert clone.layer_spec(spec, config(comm_type)) is spec
    assert clone.prediction_spec(spec, config(comm_type)) is spec


@pytest.mark.parametrize("comm_type", ["dfa", ["dfa"], ["dfa", "dfa"]])
def test_the_flag_alone_puts_distributed_attention_into_the_default_spec(comm_type: Any) -> None:
    wanted = config(comm_type)
    layer = clone.layer_spec(megatrons_spec(wanted), wanted)
    assert issubclass(layer.module, DistributedAttentionLayer)
    assert layer.params["distributed_attention"].options.data_layout == "boundary"
    again = clone.layer_spec(layer, wanted)  # a user who also gives --spec
    assert again.module is layer.module


def test_prediction_layers_get_it_too() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    wanted = make_config(Topology(), case(), mtp_num_layers=1, cp_comm_type="dfa")
    spec = clone.prediction_spec(megatrons_spec(wanted), wanted)
    assert isinstance(spec, TransformerBlockSubmodules)  # get_gpt_mtp_block_spec takes its last layer
    assert issubclass(spec.layer_specs[0].module, DistributedAttentionLayer)
