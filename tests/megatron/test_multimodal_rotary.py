"""Multimodal rotary embeddings: position_ids (3, batch, seq) are a time, a height and a width of every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness
from tests.megatron.harness import BATCH, MEGATRONS, SEQUENCE, Topology, case

SECTIONS = [4, 2, 2]
"""Of the eight frequencies of a head of 16."""


def places() -> torch.Tensor:
    """An image of 4 x 6 tokens after 10 of text, and text again; another place for it in the second row."""
    rows = []
    for start in (10, 3):
        image = torch.stack((torch.zeros(24), torch.arange(24) // 6, torch.arange(24) % 6)) + start
        before, after = torch.arange(start), torch.arange(SEQUENCE - start - 24) + start + 6
        rows.append(torch.cat((before.expand(3, -1), image, after.expand(3, -1)), dim=1))
    return torch.stack(rows, dim=1).long()


def run(topology: Topology, options: DistAttentionConfig | None, batch: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    """Losses of this rank's tokens, and gradients summed over the context-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from dfa_megatron.megatron import distribute_attention

    wanted = MEGATRONS if options is None else case(options.data_layout)
    config = harness.make_config(topology, wanted, mrope_section=SECTIONS)
    spec = harness.megatrons_spec(config)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec if options is None else distribute_attention(spec, config, config=options),
        vocab_size=harness.VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="mrope",
        share_embeddings_and_output_weights=False,
    )
    harness.set_weights(model)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool() if options is None else None
    losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    losses.sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def compare_with_one_rank(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch
    from dfa_megatron.megatron.tokens.exchange import positions

    batch = {**harness.micro_batch(0, 0), "position_ids": places()}
    harness.start(Topology(dp=ranks))
    expected, expected_gradients = run(Topology(dp=ranks), None, batch)
    plain = dict(batch, position_ids=torch.arange(SEQUENCE).expand(3, BATCH, -1))
    assert (run(Topology(dp=ranks), None, plain)[0] - expected).abs().max() > 1e-3, "the places tell"

    harness.start(Topology(cp=ranks))
    group = parallel_state.get_context_parallel_group()
    zigzag = DistAttentionConfig(data_layout="zigzag")
    local = shard_batch(batch, group, zigzag)
    assert torch.equal(local["position_ids"], batch["position_ids"])
    losses, gradients = run(Topology(cp=ranks), zigzag, local)
    torch.testing.assert_close(losses, expected[:, positions("zigzag", SEQUENCE, ranks, rank)], rtol=1e-5, atol=1e-5)
    for name, gradient in expected_gradients.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-5, f"the gradient of {name} is off by {error:.2e}"

    for layout in ("contiguous", "boundary"):
        with pytest.raises(UnsupportedError, match=rf"position_ids.*data_layout='{layout}'.*data_layout='zigzag'"):
            shard_batch(batch, group, DistAttentionConfig(data_layout=layout))
    with pytest.raises(UnsupportedError, match=r"position_ids.*packed documents.*one document per row"):
        shard_batch({**batch, "cu_seqlens": harness.documents(0, 0)}, group, zigzag)


@pytest.mark.support("megatron", "multimodal rotary embeddings, layout `zigzag`, CP 2")
def test_two_ranks_equal_one_with_position_ids_that_stay_whole() -> None:
    run_ranks(2, compare_with_one_rank)
