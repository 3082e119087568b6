"""What a patched Megatron-LM clone calls: distributed attention where --cp-comm-type dfa asks for it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron import DistributedAttentionLayer
from dfa_megatron.megatron.selfcheck.model import DenseAttention
from dfa_megatron.megatron.start import clone, dfa_flags
from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness
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


def test_prediction_layers_get_it_in_megatrons_order() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    wanted = make_config(Topology(), case(), mtp_num_layers=1, cp_comm_type="dfa")
    spec = clone.prediction_spec(megatrons_spec(wanted), wanted)
    assert isinstance(spec, TransformerBlockSubmodules)  # get_gpt_mtp_block_spec takes its last layer
    context = spec.layer_specs[0].params["distributed_attention"]
    assert (context.options.data_layout, context.options.schedule) == ("zigzag", "auto")


def slices(rank: int, world_size: int) -> None:
    from megatron.core import parallel_state, utils

    from dfa_megatron.megatron import distribute_attention

    harness.start(Topology(cp=world_size))
    distribute_attention(megatrons_spec(config("dfa")))
    whole = {"tokens": torch.arange(16).view(2, 8)}
    takes = inspect.signature(utils.get_batch_on_this_cp_rank).parameters
    hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in takes else {}
    for layout, places in (("boundary", (0, 1, 6, 7)), ("contiguous", (0, 1, 2, 3))):
        options = DistAttentionConfig(data_layout=layout)
        clone.options_of = lambda options=options: options
        clone.global_args = lambda layout=layout: SimpleNamespace(dfa_data_layout=layout)
        batch = clone.get_batch_on_this_cp_rank(dict(whole), **hybrid)
        if rank == 0:
            assert torch.equal(batch["tokens"], whole["tokens"][:, list(places)])
        group = parallel_state.get_context_parallel_group()
        again = clone.get_batch_on_this_cp_rank(dict(whole), cp_group=group, **hybrid)
        assert torch.equal(again["tokens"], batch["tokens"])
    with pytest.raises(UnsupportedError, match=r"2 x CP = 4 parts"):
        clone.get_batch_on_this_cp_rank({"tokens": torch.zeros(1, 7)}, **hybrid)

    from megatron.core.models.gpt.gpt_model import GPTModel

    teacher = make_config(Topology(cp=world_size), harness.MEGATRONS)
    spec = clone.layer_spec(megatrons_spec(teacher), teacher)
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    with pytest.raises(UnsupportedError, match="Megatron's own attention beside --dfa-data-layout contiguous"):
        GPTModel(teacher, spec, harness.VOCABULARY, harness.SEQUENCE)


def test_batches_are_sliced_as_the_layout_flag_says_and_another_model_is_refused_them() -> None:
    run_ranks(2, slices)


def test_a_run_without_our_flags_meets_none_of_our_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(create_attention_mask_in_dataloader=True, context_parallel_size=2)
    for where in (dfa_flags, clone):
        monkeypatch.setattr(where, "global_args", lambda: args)

    def megatrons(batch: Any) -> Any:
        return {"sliced": batch}

    monkeypatch.setattr("megatron.core.utils.get_batch_on_this_cp_rank", megatrons)
    assert clone.get_batch_on_this_cp_rank("batch") == {"sliced": "batch"}
    plain = config("p2p")
    assert clone.layer_spec("spec", plain) == "spec"
