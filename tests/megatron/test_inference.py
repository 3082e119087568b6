"""A static inference context on one context-parallel rank: a prompt, then tokens one by one and several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import harness
from tests.megatron.harness import Topology, case
from tests.megatron.test_swapped_groups import install
from tests.support.workers import run_ranks

SINKS_IN_A_WINDOW = (("window_size", (9, 0)), ("window_attn_skip_freq", 2), ("softmax_type", "learnable"))


def evaluate(rank: int, ranks: int) -> None:
    from megatron.core.inference.contexts import StaticInferenceContext

    harness.start(Topology(cp=ranks))
    model = harness.make_model(
        harness.make_config(Topology(cp=ranks), case(config=SINKS_IN_A_WINDOW)), MegatronConfig()
    ).eval()
    tokens = harness.micro_batch(0, 0)["tokens"]
    places = torch.arange(harness.SEQUENCE).expand(harness.BATCH, -1)
    cache: Any = StaticInferenceContext(harness.BATCH, harness.SEQUENCE)

    def read(lo: int, hi: int) -> torch.Tensor:
        logits = model(tokens[:, lo:hi], places[:, lo:hi], None, inference_context=cache, runtime_gather_output=True)
        cache.increment_sequence_len_offset(hi - lo)
        return logits

    with torch.no_grad():
        if ranks > 1:
            with pytest.raises(UnsupportedError, match=r"inference context.*--context-parallel-size 1"):
                read(0, 20)
            alone = copy.copy(model.pg_collection)
            alone.cp = alone.tp_cp = alone.tp_dp_cp = alone.dp_cp = dist.new_group(
                [rank], use_local_synchronization=True
            )
            install(model, alone)
        whole = model(tokens, places, None)
        for lo, hi in ((0, 20), (20, 21), (21, 22), (22, 26)):
            logits = read(lo, hi)
            torch.testing.assert_close(logits[:, -1], whole[:, hi - 1], rtol=1e-4, atol=1e-5)


def test_logits_with_a_cache_are_those_of_the_whole_sequence() -> None:
    run_ranks(1, evaluate)


def test_a_cache_of_several_ranks_is_refused_and_that_of_one_that_is_swapped_in_works() -> None:
    run_ranks(2, evaluate)
