"""Multi-token prediction: its tokens and labels shift across ranks, and not across documents."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import harness, padded_packs
from tests.megatron.harness import BATCH, MEGATRONS, SEQUENCE, Topology, case
from tests.megatron.kinds import TWO_AHEAD
from tests.support.workers import run_ranks

OFFSETS = (0, 1, 2, 17, 20, 60, 83, 84, 96)
HOMES = ("megatron.core.transformer.multi_token_prediction", "megatron.core.models.gpt.gpt_model")


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


def run(
    topology: Topology, options: MegatronConfig | None, batch: dict[str, Any], *, per_token: bool
) -> tuple[torch.Tensor, Any]:
    """Losses of this rank's tokens, and gradients summed over the ranks that share them."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    wanted = MEGATRONS if options is None else case(options.data_layout)
    grouped = {"hybrid_context_parallel": options is not None and topology.cp == 1}
    grouped["calculate_per_token_loss"] = per_token
    model = harness.make_model(harness.make_config(topology, wanted, **dict(TWO_AHEAD), **grouped), options)
    # Megatron's DDP divides the gradients by the ranks, unless the loss is per token.
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1 if options is None or per_token else 1 / dist.get_world_size()))
    document = torch.bucketize(torch.arange(OFFSETS[-1]), torch.tensor(OFFSETS[1:]), right=True)
    apart = (document[:, None] != document) | torch.ones(OFFSETS[-1], OFFSETS[-1]).triu(1).bool()
    mask = apart[None, None] if options is None else None
    losses = model(**harness.taken(batch, attention_mask=mask))
    (losses * batch["loss_mask"]).sum().backward()
    for parameter in model.parameters() if options else ():
        dist.all_reduce(parameter.grad)
    return losses.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def alone(ranks: int, batch: dict[str, Any], *, per_token: bool) -> tuple[torch.Tensor, Any]:
    """What one rank comes to, with Megatron's own shift in documents and a mask that keeps them apart."""
    from megatron.core.packed_seq_params import PackedSeqParams

    modules = [module for module in map(importlib.import_module, HOMES) if hasattr(module, "roll_tensor")]
    kept = [module.roll_tensor for module in modules]
    megatrons = getattr(kept[0], "_dfa_megatron", kept[0])

    def in_documents(tensor: Any, shifts: int, dims: int, cp_group: Any, packed_seq_params: Any) -> Any:
        return megatrons(tensor, shifts, dims, cp_group, pack)

    pack = PackedSeqParams("thd", cu_seqlens_q=batch["cu_seqlens"], cu_seqlens_kv=batch["cu_seqlens"])
    for module in modules:
        module.roll_tensor = in_documents
    try:
        return run(Topology(dp=ranks), None, batch, per_token=per_token)
    finally:
        for module, function in zip(modules, kept, strict=True):
            module.roll_tensor = function


def compare_packs(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch
    from tests.megatron.attends import positions

    apart, together = Topology(dp=ranks), Topology(cp=ranks)
    rows = {name: x.reshape(1, -1) for name, x in harness.micro_batch(0, 0).items()}
    rows |= {"position_ids": torch.arange(BATCH * SEQUENCE)[None], "cu_seqlens": torch.tensor(OFFSETS).int()}
    total = padded_packs.total_of(rows["tokens"].shape, ranks, 1)
    full = {**rows, "loss_mask": torch.ones(1, BATCH * SEQUENCE)}
    is_real = padded_packs.cut(full, ranks, rank, total, 0)["loss_mask"][0].bool()
    held = {order: positions(order, OFFSETS[-1], ranks, rank) for order in ("contiguous", "zigzag")}
    held["padded"] = padded_packs.cut(full, ranks, rank, total, 0)["position_ids"][0, is_real]
    harness.start(apart)
    ways = [(mask, per_token) for mask in (0, 1) for per_token in (False, True)]
    wholes = {mask: {**rows, "loss_mask": harness.loss_mask(mask, OFFSETS[-1], 1)} for mask in (0, 1)}
    expected = {way: alone(ranks, wholes[way[0]], per_token=way[1]) for way in ways}

    def check(topology: Topology, layout: str, order: str, local: dict[str, Any], way: tuple[int, bool]) -> None:
        losses, gradients = run(topology, MegatronConfig(data_layout=layout), local, per_token=way[1])
        wanted, wanted_gradients = expected[way]
        here = is_real if order == "padded" else slice(None)
        torch.testing.assert_close(losses[:, here], wanted[:, held[order]], rtol=1e-5, atol=1e-5)
        for name, gradient in wanted_gradients.items():
            error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, f"{layout}, {order}, {way}: the gradient of {name} is off by {error:.2e}"

    own = dist.new_group(list(range(ranks)))
    for form, way in ((0, ways[0]), (1, ways[3])):
        grouped = padded_packs.cut(wholes[way[0]], ranks, rank, total, form)
        grouped["params"].local_cp_size, grouped["params"].cp_group = ranks, own
        check(apart, "boundary", "padded", grouped, way)
    harness.start(together)
    for way in ways[1:3]:
        check(together, "boundary", "padded", padded_packs.cut(wholes[way[0]], ranks, rank, total, 0), way)
    for layout, order in (("contiguous", "contiguous"), ("boundary", "zigzag")):
        options, group = MegatronConfig(data_layout=layout), parallel_state.get_context_parallel_group()
        for way in ways[0:4:3] if layout == "contiguous" else ways[1:3]:
            check(together, layout, order, shard_batch(wholes[way[0]], group, options), way)


@pytest.mark.support("megatron", "multi-token prediction of packs; layouts `contiguous`, `boundary`, CP 3")
def test_packs_shift_in_their_documents() -> None:
    run_ranks(3, compare_packs)


def scripts_predictions(rank: int, ranks: int) -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    from dfa_megatron.megatron import DistributedAttentionLayer
    from dfa_megatron.megatron.script import script_specs

    harness.start(Topology(cp=ranks))
    for _ in range(2):  # the second time replaces nothing
        script_specs._distribute_predictions()
    config = harness.make_config(Topology(cp=ranks), case(), mtp_num_layers=1)
    block = gpt_layer_specs.get_gpt_mtp_block_spec(config, harness.megatrons_spec(config), use_transformer_engine=False)
    parts = vars(block.layer_specs[0].submodules)
    inner = parts.get("transformer_layer") or parts["mtp_model_layer"]
    assert issubclass(inner.module, DistributedAttentionLayer)


def other_attention(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dfa_megatron.megatron import shard_batch
    from tests.support import megatron_model as small_model
    from tests.support.megatron_model import DenseAttention

    harness.start(Topology(cp=ranks))
    options = MegatronConfig()
    config = harness.make_config(Topology(cp=ranks), case(), mtp_num_layers=1)
    layer = harness.megatrons_spec(config)
    layer.submodules.self_attention.submodules.core_attention = DenseAttention
    own = TransformerBlockSubmodules(layer_specs=[layer])
    model = small_model.build_chunk(
        config,
        options,
        None,
        harness.WEIGHT,
        vocab_size=harness.VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, own, use_transformer_engine=False),
    )
    batch = shard_batch(harness.micro_batch(0, 0), parallel_state.get_context_parallel_group(), options)
    with pytest.raises(UnsupportedError, match=r"own attention in a distributed model, in layout 'contiguous'"):
        model(**batch)


def each(rank: int, ranks: int) -> None:
    for check in (open_rolls, other_attention, scripts_predictions):
        check(rank, ranks)


def test_rolls_of_newer_releases_layers_with_another_attention_and_those_of_megatrons_default_spec() -> None:
    """Taken and passed on, refused where tokens are in order, and distributed by a spec of flags."""
    run_ranks(2, each)
