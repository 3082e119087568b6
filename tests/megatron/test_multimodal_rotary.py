"""Multimodal rotary embeddings: position_ids (3, batch, seq) are a time, a height and a width of every token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import masks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import attends, harness
from tests.megatron.harness import BATCH, MEGATRONS, SEQUENCE, Topology, case
from tests.support.workers import run_ranks

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


def run(
    topology: Topology,
    options: MegatronConfig | None,
    batch: dict[str, Any],
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """Losses of this rank's tokens, and gradients summed over the context-parallel ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    from dfa_megatron.megatron import distribute_attention

    wanted = MEGATRONS if options is None else case(options.data_layout)
    config = harness.make_config(topology, wanted, num_layers=2, mrope_section=SECTIONS)
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
    losses = model(**harness.taken(batch, attention_mask=mask))
    (losses * batch["loss_mask"]).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=parallel_state.get_context_parallel_group())
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def alone(ranks: int, batch: dict[str, Any], offsets: list[list[int]]) -> tuple[torch.Tensor, Any]:
    """Losses and gradients of one rank, whose mask keeps documents apart."""
    document = torch.stack(
        [torch.bucketize(torch.arange(SEQUENCE), torch.tensor(row[1:]), right=True) for row in offsets]
    )
    apart = document[:, None, :, None] != document[:, None, None, :]
    return run(Topology(dp=ranks), None, batch, apart | torch.ones(SEQUENCE, SEQUENCE).triu(1).bool())


def compare_with_one_rank(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch
    from tests.megatron.attends import positions

    batch = {**harness.micro_batch(0, 0), "position_ids": places()}
    pack = {**batch, "cu_seqlens": attends.documents(0, 0)}
    images = masks.two_way_blocks((SEQUENCE,), [(10, 34)])
    seen = {**batch, "mask": images}
    harness.start(Topology(dp=ranks))
    expected = {
        "rows": alone(ranks, batch, [[0, SEQUENCE]] * BATCH),
        "pack": alone(ranks, batch, pack["cu_seqlens"].tolist()),
        "mask": run(Topology(dp=ranks), None, batch, ~attends.seen(images)),
    }
    plain = dict(batch, position_ids=torch.arange(SEQUENCE).expand(3, BATCH, -1))
    losses = alone(ranks, plain, [[0, SEQUENCE]] * BATCH)[0]
    assert (losses - expected["rows"][0]).abs().max() > 1e-3, "the places tell"

    harness.start(Topology(cp=ranks))
    group = parallel_state.get_context_parallel_group()
    for layout, inside in (("zigzag", "zigzag"), ("boundary", "zigzag"), ("contiguous", "contiguous")):
        options = MegatronConfig(data_layout=layout)
        for name, whole in (("rows", batch), ("pack", pack), ("mask", seen)):
            local = shard_batch(whole, group, options)
            cut = local["position_ids"].chunk(ranks, -1)[rank]
            short = rf"a rotary table of shape \({cut.shape[-1]}, .* for {cut.shape[-1] * ranks} positions"
            with pytest.raises(UnsupportedError, match=short):
                run(Topology(cp=ranks), options, {**local, "position_ids": cut})
            assert local["position_ids"].shape[-1] == local["input_ids"].shape[1] * ranks
            losses, gradients = run(Topology(cp=ranks), options, local)
            wanted = expected[name][0].reshape(len(losses), -1)
            here = positions(inside, wanted.shape[1], ranks, rank)
            torch.testing.assert_close(losses, wanted[:, here], rtol=1e-5, atol=1e-5)
            for parameter, gradient in expected[name][1].items():
                error = (gradients[parameter] - gradient).abs().max() / gradient.abs().max()
                assert error <= 1e-5, f"{layout}, {name}: the gradient of {parameter} is off by {error:.2e}"
    compare_padded(rank, ranks, pack, expected["pack"])


def compare_padded(rank: int, ranks: int, pack: dict[str, Any], expected: tuple[torch.Tensor, Any]) -> None:
    """Documents that are padded and cut zigzag one by one."""
    from tests.megatron import padded_packs

    harness.start(Topology(cp=ranks))  # nobody declares how batches are sliced
    total = padded_packs.total_of(pack["tokens"].shape, ranks, 1)
    flat = {**pack, "position_ids": torch.arange(BATCH * SEQUENCE)}
    local = padded_packs.cut(flat, ranks, rank, total, form=0)
    params, held = local["params"], local["position_ids"][0]
    shift = (params.cu_seqlens_q_padded - params.cu_seqlens_q)[:-1].repeat_interleave(params.cu_seqlens_q.diff())
    padded = torch.randint(0, 9, (3, 1, total))
    padded[:, 0, torch.arange(BATCH * SEQUENCE) + shift] = pack["position_ids"].flatten(1)
    real = local["loss_mask"][0].bool()
    options = MegatronConfig(data_layout="boundary")
    losses, gradients = run(Topology(cp=ranks), options, {**local, "position_ids": padded})
    torch.testing.assert_close(losses[0, real], expected[0].flatten()[held[real]], rtol=1e-5, atol=1e-5)
    for parameter, gradient in expected[1].items():
        error = (gradients[parameter] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-5, f"padded: the gradient of {parameter} is off by {error:.2e}"


@pytest.mark.support("megatron", "multimodal rotary embeddings, packed and not; every layout, CP 3")
def test_ranks_equal_one_with_position_ids_that_stay_whole() -> None:
    run_ranks(3, compare_with_one_rank)
