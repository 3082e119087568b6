"""What a patched Megatron-LM clone calls: distributed attention where --cp-comm-type dfa asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from dfa_megatron.megatron import DistributedAttentionLayer
from dfa_megatron.megatron.script import script_specs
from tests.megatron.harness import Topology, case, make_config, megatrons_spec


def config(comm_type: Any) -> Any:
    made = make_config(Topology(), case())
    made.cp_comm_type = comm_type
    return made


@pytest.mark.parametrize("comm_type", [None, "p2p", "a2a", ["p2p", "dfa"], []])
def test_without_the_flag_everything_stays_megatrons(comm_type: Any) -> None:
    spec = megatrons_spec(config(comm_type))
    assert script_specs.layer_spec(spec, config(comm_type)) is spec
    assert script_specs.prediction_spec(spec, config(comm_type)) is spec


@pytest.mark.parametrize("comm_type", ["dfa", ["dfa"], ["dfa", "dfa"]])
def test_the_flag_alone_puts_distributed_attention_into_the_default_spec(comm_type: Any) -> None:
    wanted = config(comm_type)
    layer = script_specs.layer_spec(megatrons_spec(wanted), wanted)
    assert issubclass(layer.module, DistributedAttentionLayer)
    assert layer.params["distributed_attention"].options.data_layout == "boundary"
    predicting = script_specs.prediction_spec(megatrons_spec(wanted), wanted)  # get_gpt_mtp_block_spec takes its last
    assert issubclass(predicting.layer_specs[0].module, DistributedAttentionLayer)
    again = script_specs.layer_spec(layer, wanted)  # a user who also gives --spec
    assert again.module is layer.module
