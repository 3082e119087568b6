"""Megatron's clip_qk and log of the largest attention logit, of the heads' maxima over all ranks."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron import attends, harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.kinds import BY_LIST, LATENT
from tests.support.workers import run_ranks

THRESHOLD = 0.004
CASES = (
    (Topology(cp=2), case("boundary", config=BY_LIST)),
    (Topology(cp=2), case("contiguous", "remat", config=LATENT, pairs="documents")),
    (Topology(tp=2), case("zigzag", config=(("num_layers", 2),))),
)


def note(core: Any, args: Any, given: Any, window: int) -> None:
    """Keep every head's largest logit of a call of Megatron's own attention, as clip_qk reads it."""
    query, key = args[:2]
    q, k = (x.detach().double().permute(1, 2, 0, 3) for x in (query, key))
    scale = getattr(core, "softmax_scale", None) or core.scale or q.shape[-1] ** -0.5
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    found = scores.masked_fill((behind < 0) | (behind > window), -torch.inf).amax((0, 2, 3)).float()
    core.current_max_attn_logits = torch.maximum(core.current_max_attn_logits, found)


def dense(model: Any, wholes: list[dict[str, Any]], wanted: Case) -> list[torch.Tensor]:
    """Run Megatron's own attention on one rank, and return the largest logits of every layer."""
    config, cores = dict(wanted.config), [layer.self_attention.core_attention for layer in model.decoder.layers]
    for at, core in enumerate(cores):
        windowed = "window_size" in config and config["window_attn_skip_freq"][at]
        window = config["window_size"][0] if windowed else harness.SEQUENCE
        core.current_max_attn_logits = torch.full((harness.HEADS,), -torch.inf)
        core.register_forward_pre_hook(functools.partial(note, window=window), with_kwargs=True)
    for whole in wholes:
        if wanted.pairs:
            attends.alone(whole, model)
        else:
            hidden = attends.hidden_above(harness.SEQUENCE)
            model(whole["tokens"], whole["position_ids"], hidden, labels=whole["labels"])
    return [core.current_max_attn_logits for core in cores]


def clip(rank: int, world_size: int, cases: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.optimizer.qk_clip import clip_qk

    from dfa_megatron.megatron import shard_batch

    def clipped(model: Any, **how: Any) -> float:
        return float(clip_qk([SimpleNamespace(module=SimpleNamespace(module=model))], **how))

    for topology, wanted in cases:
        given = {"qk_clip": True, "qk_clip_threshold": THRESHOLD}
        wholes = [harness.micro_batch(0, at) | attends.entries(wanted.pairs, 0, at) for at in range(2)]
        harness.start(Topology(dp=2))
        config = harness.make_config(Topology(), Case(None, config=wanted.config), **given)
        own = harness.make_model(config, None)
        maxima = dense(own, wholes, wanted)
        largest = clipped(own)
        harness.start(topology)
        model = harness.make_model(harness.make_config(topology, wanted, **given), wanted.options).train()
        cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
        for whole in wholes:
            batch = shard_batch(whole, parallel_state.get_context_parallel_group(), wanted.options)
            model(**batch).sum().backward()
        heads = slice(None) if topology.tp == 1 else slice(2 * rank, 2 * rank + 2)
        for core, expected in zip(cores, maxima, strict=True):
            torch.testing.assert_close(core.current_max_attn_logits, expected[heads], rtol=1e-5, atol=0)
            assert (expected > THRESHOLD).any()
        if topology.tp > 1:  # where Megatron's own clip_qk mistakes the shape of grouped weights
            continue
        log = clipped(model)
        assert abs(log - largest) <= 1e-5 * largest
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, own.get_parameter(name), rtol=1e-5, atol=1e-7)
        assert all(core.current_max_attn_logits is None for core in cores)
        model.eval()(**batch)
        assert all(core.current_max_attn_logits is None for core in cores), "an evaluation is not part of a step"
        dist.barrier()


def test_clipping_and_its_log_are_those_of_dense_attention() -> None:
    run_ranks(2, clip, CASES)
