"""Scores of a loss that goes by tiles, and Megatron's clip_qk and log of the largest attention logit."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss import by_document, scores_of
from tests.frameworks import megatron_harness as harness
from tests.frameworks.compare import gradients_of
from tests.frameworks.megatron_rows import BY_LIST, like
from tests.fuzz.frameworks.megatron_draw import VOCABULARY, MegatronDraw
from tests.fuzz.frameworks.one_rank import apart, hidden
from tests.support.workers import run_each


def scores(rank: int, world_size: int) -> None:
    """Log-probabilities and entropy of a tied model, and all its gradients, beside those of its own logits."""
    found = []
    for tile in (7, "off"):
        row = like("plain", {"cp": world_size}, options={"loss_tile": tile})
        row.model["share_embeddings_and_output_weights"] = True
        harness.start(row)
        model, batch = harness.model_of(row), harness.taken(next(harness.batches(row)))
        labels = batch.pop("labels")
        if tile == "off":
            with (
                pytest.raises(UnsupportedError, match="scores_of a GPTModel with 0 losses made by tiles"),
                scores_of(model),
            ):
                pass
            logp = model(**batch).log_softmax(-1)
            logprobs = logp.gather(-1, labels[..., None])[..., 0]
            entropy = -(logp.exp() * logp).sum(-1)
        else:
            with scores_of(model) as seen:
                losses = model(**batch, labels=labels)
            logprobs, entropy = seen.logprobs, seen.entropy
            assert logprobs.shape == entropy.shape == labels.shape
            assert torch.equal(losses, -logprobs)
            assert model(**batch).shape == (row.batch, row.tokens // world_size, VOCABULARY)
        (logprobs.sum() - 2 * entropy.sum()).backward()
        gradients = gradients_of(model, model.cp_group).values()
        found.append([*by_document(logprobs), *by_document(entropy, (0, 9, row.tokens)), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, check_dtype=False)


THRESHOLD = 0.2
ROWS = (
    like("plain", {"cp": 2}, "boundary", config=BY_LIST),
    like("packed latent", {"cp": 2}, "contiguous", "remat"),
    like("plain", {"tp": 2}, "zigzag"),
)


def note(core: Any, args: Any, given: Any, window: int) -> None:
    """Keep every head's largest logit of a call of Megatron's own attention, as clip_qk reads it."""
    query, key = args[:2]
    q, k = (x.detach().double().permute(1, 2, 0, 3) for x in (query, key))
    scale = getattr(core, "softmax_scale", None) or core.scale or q.shape[-1] ** -0.5
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    behind = torch.arange(len(query))[:, None] - torch.arange(len(query))
    found = scores.masked_fill(hidden(len(query)) | (behind > window), -torch.inf).amax((0, 2, 3)).float()
    core.current_max_attn_logits = torch.maximum(core.current_max_attn_logits, found)


def dense(model: Any, row: MegatronDraw) -> list[torch.Tensor]:
    """Run Megatron's own attention on one rank, and return the largest logits of every layer."""
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    for at, core in enumerate(cores):
        windowed = "window_size" in row.config and row.config["window_attn_skip_freq"][at]
        core.current_max_attn_logits = torch.full((row.config["num_attention_heads"],), -torch.inf)
        window = row.config["window_size"][0] if windowed else row.tokens * row.batch
        core.register_forward_pre_hook(functools.partial(note, window=window), with_kwargs=True)
    with apart() if row.has_documents else contextlib.nullcontext():
        for batch in harness.batches(row):
            harness.alone(row, batch, model)
    return [core.current_max_attn_logits for core in cores]


def clip(rank: int, world_size: int) -> None:
    from megatron.core.optimizer.qk_clip import clip_qk

    def clipped(model: Any, **how: Any) -> float:
        return float(clip_qk([SimpleNamespace(module=SimpleNamespace(module=model))], **how))

    given = {"qk_clip": True, "qk_clip_threshold": THRESHOLD}
    for row in ROWS:
        harness.start(row.alone())
        own = harness.model_of(row.alone(), harness.config_of(row.alone(), **given))
        maxima = dense(own, row.alone())
        largest = clipped(own)
        harness.start(row)
        model = harness.model_of(row, harness.config_of(row, **given))
        cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
        for batch in harness.batches(row):
            model(**harness.taken(batch)).sum().backward()
        heads = slice(None) if row.tp == 1 else slice(2 * rank, 2 * rank + 2)
        for core, expected in zip(cores, maxima, strict=True):
            torch.testing.assert_close(core.current_max_attn_logits, expected[heads], rtol=1e-5, atol=0)
            assert (expected > THRESHOLD).any()
        if row.tp > 1:  # where Megatron's own clip_qk mistakes the shape of grouped weights
            continue
        log = clipped(model)
        assert abs(log - largest) <= 1e-5 * largest
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, own.get_parameter(name), rtol=1e-5, atol=1e-7)
        assert all(core.current_max_attn_logits is None for core in cores)
        model.eval()(**harness.taken(batch))
        assert all(core.current_max_attn_logits is None for core in cores), "an evaluation is not part of a step"
        dist.barrier()


def test_log_probabilities_and_entropy_are_those_of_logits_and_clipping_and_its_log_those_of_dense_attention() -> None:
    run_each(2, scores, clip, timeout=120)
