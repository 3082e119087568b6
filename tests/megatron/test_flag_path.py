"""Megatron's command line, as its own scripts parse it, builds a model with distributed attention that trains."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments
from dfa_megatron.runtime.counters import COUNTERS
from tests.megatron import harness
from tests.support.workers import run_ranks

pytest.importorskip("megatron.training.models", reason="this megatron-core has no training package")

FLAGS = """
--transformer-impl local --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --ffn-hidden-size 128 --seq-length 48 --max-position-embeddings 48 --micro-batch-size 2
--train-iters 1 --lr 1e-3 --context-parallel-size 2 --attention-dropout 0.0 --hidden-dropout 0.0
--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
--no-persist-layer-norm --use-cpu-initialization --no-gradient-accumulation-fusion --no-bias-dropout-fusion
--no-masked-softmax-fusion --no-rope-fusion --no-create-attention-mask-in-dataloader --tokenizer-type NullTokenizer
--vocab-size 256 --make-vocab-size-divisible-by 1 --distributed-backend gloo
"""
OURS = "--cp-comm-type dfa --spec dfa_megatron.megatron get_spec"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def build(flags: str, provider: Any) -> tuple[Any, Any]:
    """What pretrain_gpt.py does up to the model, with the device queries that CPU cannot answer."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *flags.split()]
    harness.start(harness.Topology(cp=2))
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=provider)
    config = gpt_config_from_args(args)
    builder = config.get_builder_cls()(config)
    return args, builder.build_model(ProcessGroupCollection.use_mpu_process_groups())


def train_from_flags(rank: int, world_size: int, flags: str, with_provider: bool, layout: str, path: str) -> None:
    from megatron.core import parallel_state

    from dfa_megatron.megatron import DistributedAttentionLayer, DistributedCoreAttention, options_of, shard_batch

    args, model = build(f"{FLAGS} {OURS} {FULL} {flags}", add_dfa_arguments if with_provider else None)
    options = options_of()
    assert options.data_layout == layout
    for layer in model.decoder.layers:
        assert isinstance(layer, DistributedAttentionLayer)
        assert isinstance(layer.self_attention.core_attention, DistributedCoreAttention)
        assert layer.self_attention.core_attention.options == options
    assert args.recompute_granularity == "full"
    assert model.config.recompute_granularity == "full", "the config is the caller's"

    reference = torch.load(path, weights_only=True)
    harness.set_weights(model)
    COUNTERS.reset()
    total = torch.zeros(())
    for micro in range(harness.MICRO_BATCHES):
        batch = shard_batch(harness.micro_batch(0, micro), parallel_state.get_context_parallel_group(), options)
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = harness.share_of_loss(losses, batch)
        loss.backward()
        total += loss.detach()
    assert model.decoder.config.recompute_granularity is None, "full recomputation is taken over"
    dist.all_reduce(total)
    assert abs(total.item() - reference["losses"][0]) <= 1e-5
    attentions = harness.LAYERS * harness.MICRO_BATCHES
    assert (COUNTERS.attention_forwards, COUNTERS.replays) == (attentions, attentions)


@pytest.mark.parametrize(
    ("flags", "with_provider", "layout"),
    [
        ("", False, "boundary"),
        ("--dfa-data-layout boundary --dfa-schedule ring", True, "boundary"),
        ("--dfa-data-layout zigzag", True, "zigzag"),
        ("--dfa-data-layout contiguous", True, "contiguous"),
    ],
    ids=["an unmodified script", "boundary", "zigzag", "contiguous"],
)
def test_flags_build_a_model_that_trains_like_one_rank(
    flags: str, with_provider: bool, layout: str, reference: str
) -> None:
    run_ranks(2, train_from_flags, flags, with_provider, layout, reference)
