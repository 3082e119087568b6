"""A layer in use: batches in the wrong order, evaluation, frozen inputs, and what it says about itself."""

from __future__ import annotations

import copy
import logging
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank

from dfa_megatron import remat
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.loss.deferred import WATCHED
from dfa_megatron.megatron import declare_batch_layout, distribute_attention, shard_batch
from dfa_megatron.megatron.stand_in import use_cpu
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import FULL, like
from tests.fuzz.frameworks.megatron_draw import VOCABULARY, MegatronDraw
from tests.megatron import padded_packs
from tests.support.arguments import assert_refused
from tests.support.live_bytes import living
from tests.support.megatron_model import megatrons_spec
from tests.support.workers import run_each

LAYERS = 2


def whole_batch() -> dict[str, Any]:
    """A global micro-batch of the plain model."""
    batch = like("plain", masks=("holes",)).global_batch(0)[0]
    return {name: x for name, x in batch.items() if name != "cu_seqlens"}


def plain(layout: str = "contiguous", checkpoint: str = "auto", **how: Any) -> MegatronDraw:
    """A model of two layers over all ranks."""
    return like("plain", {"cp": dist.get_world_size()}, layout, checkpoint, **how)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**harness.taken(batch)).mean()
    return loss


def dist_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def wrong_batches(rank: int, world_size: int) -> None:
    harness.start(plain())
    contiguous, boundary = MegatronConfig(), MegatronConfig(data_layout="boundary")
    whole = whole_batch()
    mine = {name: part.chunk(world_size, 1)[rank] for name, part in whole.items()}
    with pytest.raises(UnsupportedError, match=r"batches that nobody is known to have cut in order.*shard_batch"):
        loss_of(harness.model_of(plain()), mine)  # nobody said how these were sliced
    declare_batch_layout(dist_group(), "contiguous")
    expected = loss_of(harness.model_of(plain()), mine)
    assert torch.equal(expected, loss_of(harness.model_of(plain()), shard_batch(whole, dist_group(), contiguous)))
    with pytest.raises(UnsupportedError, match="data_layout='boundary' on batches that are cut contiguous"):
        loss_of(harness.model_of(plain("boundary")), mine)
    assert_refused("contiguous or zigzag", declare_batch_layout, dist_group(), "boundary")
    with pytest.raises(UnsupportedError, match="attention_mask in a batch"):
        shard_batch({**whole, "attention_mask": torch.ones(1)}, dist_group(), contiguous)
    with pytest.raises(UnsupportedError, match=r"a row of 6 tokens without cu_seqlens.* 2 x CP = 4 chunks"):
        shard_batch({"tokens": torch.zeros(1, 6)}, dist_group(), contiguous)
    packed = {"cu_seqlens": torch.tensor([[0, 4, 7]], dtype=torch.int32)}
    for length, held in ((7, 4 - dist.get_rank()), (6, 3)):
        part = shard_batch({"tokens": torch.zeros(1, length), **packed}, dist_group(), contiguous)
        assert part["input_ids"].shape == (1, held)
        for again in (part, {"tokens": part["input_ids"]}):
            assert_refused("a batch that `shard_batch` has cut", shard_batch, again, dist_group(), contiguous)
    with pytest.raises(UnsupportedError, match="local_cp_size or hybrid_cp_group in a batch without cu_seqlens"):
        shard_batch({**whole, "local_cp_size": 1}, dist_group(), contiguous)
    model = harness.model_of(plain())
    loss_of(model, shard_batch(whole, dist_group(), contiguous))
    with pytest.raises(UnsupportedError, match="data_layout='contiguous' on batches that are cut zigzag"):
        loss_of(model, shard_batch(whole, dist_group(), boundary))  # the model has taken a batch of the right order
    other_size = harness.config_of(like("plain"))
    with pytest.raises(UnsupportedError, match=r"context_parallel_size=1 in the config of a layer whose .* 2 ranks"):
        harness.model_of(plain("boundary"), other_size)
    shard_batch(whole, dist_group(), contiguous)
    with pytest.raises(UnsupportedError, match="an attention_mask tensor"):
        model(mine["tokens"], mine["position_ids"], torch.ones(1, 1, 4, 4, dtype=torch.bool), labels=mine["labels"])


def uncut_batches(rank: int, world_size: int) -> None:
    """A loop that forgets to cut one batch among others, in training and in evaluation of another length."""
    harness.start(plain())
    for layout in ("contiguous", "boundary"):
        options = MegatronConfig(data_layout=layout)
        model, whole = harness.model_of(plain(layout)), whole_batch()
        short = {name: x[:, : x.shape[1] // 2] for name, x in whole.items()}
        loss_of(model, shard_batch(whole, dist_group(), options))
        assert_refused(rf"a batch of {whole['tokens'].shape[1]} tokens .*did not cut", loss_of, model, whole)
        loss_of(model, shard_batch(short, dist_group(), options))
        mine = shard_batch(whole, dist_group(), options)
        expected = loss_of(model, mine)
    declare_batch_layout(dist_group(), "zigzag")
    assert torch.equal(loss_of(model, mine), expected)
    assert shard_batch(whole, dist_group(), options)["input_ids"].equal(mine["input_ids"])
    loss_of(model, short)  # own code slices, and is believed


def foreign_packs(rank: int, world_size: int) -> None:
    """A trainer's own packs, cut document by document, beside batches of `shard_batch` that are as long."""
    harness.start(plain())
    whole = whole_batch()
    rows, length = whole["tokens"].shape
    offsets = torch.tensor([0, 4 * world_size, length], dtype=torch.int32)
    packed = {**whole, "cu_seqlens": offsets.expand(rows, -1)}
    theirs = padded_packs.cut(packed, world_size, rank, padded_packs.total_of(whole["tokens"].shape, world_size, 1), 1)
    for layout in ("boundary", "contiguous", "zigzag"):
        options = MegatronConfig(data_layout=layout)
        model = harness.model_of(plain(layout))
        ours = shard_batch(packed, dist_group(), options)
        want, params = loss_of(model, ours), ours["packed_seq_params"]
        shard_batch({name: x[:1].repeat(1, 8) for name, x in whole.items()}, dist_group(), options)  # any length
        shard_batch({name: theirs[name].repeat(1, world_size) for name in whole}, dist_group(), options)
        by_hand = PackedSeqParams("thd", **{name: getattr(params, name) for name in OFFSETS})
        for batch, described in ((theirs, theirs["params"]), (ours, by_hand)):
            with pytest.raises(UnsupportedError, match="packed_seq_params that `shard_batch` did not make"):
                loss_of(model, {**batch, "packed_seq_params": described})
        with pytest.raises(UnsupportedError, match="a call without the packed_seq_params of a batch"):
            loss_of(model, {**ours, "packed_seq_params": None})
        assert torch.equal(loss_of(model, ours), want)
    declare_batch_layout(dist_group(), "zigzag")
    loss_of(model, {**ours, "packed_seq_params": by_hand})  # own code cuts whole rows, and is believed


OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")


def whole_batches(rank: int, world_size: int) -> None:
    """A script that cuts no batch, which only its positions show; and one whose sampler counts every rank."""
    for layout in ("boundary", "zigzag"):
        harness.start(plain())  # nobody has declared anything
        model, whole = harness.model_of(plain(layout)), whole_batch()
        more = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
        loss_of(model, get_batch_on_this_cp_rank(dict(whole), cp_group=dist_group(), **more))
        for uncut in (whole, {name: x[:, : x.shape[1] // world_size] for name, x in whole.items()}):
            assert_refused(rf"count from 0 to {uncut['tokens'].shape[1]} on a rank", loss_of, model, uncut)
        loss_of(model, {**whole, "position_ids": torch.zeros_like(whole["position_ids"])})
        declare_batch_layout(dist_group(), "zigzag")
        loss_of(model, whole)  # own code slices, and is believed
    for layout in ("contiguous", "boundary"):
        harness.start(plain())
        options, group = MegatronConfig(data_layout=layout), parallel_state.get_context_parallel_group()
        for name in ("tokens", "loss_mask"):
            other = {**whole, name: whole[name].roll(rank, 1)}
            parallel = dist.new_group(list(range(world_size)))
            assert_refused("batches that differ between the ranks", shard_batch, other, parallel, options)
        shard_batch(whole, group, options)


def swapped(rank: int, world_size: int) -> None:
    """Replace the groups of a model in every way that others do: by module, by collection, in Megatron's state."""
    harness.start(plain())
    other, same = dist.new_group([rank], use_local_synchronization=True), dist.new_group(list(range(world_size)))
    for layout in ("boundary", "contiguous"):
        model, batch = harness.model_of(plain(layout)), next(harness.batches(plain(layout)))
        layer = model.decoder.layers[1]
        expected = loss_of(model, batch)
        places = [(layer.pg_collection, "cp"), (layer.self_attention.core_attention, "cp_group")]
        places += [(parallel_state, "_CONTEXT_PARALLEL_GROUP")]
        copied = copy.copy(layer.pg_collection)
        copied.cp = other
        changes = [(holder, name, group) for holder, name in places for group in (other, same)]
        for holder, name, group in [*changes, (layer, "pg_collection", copied)]:
            kept = getattr(holder, name)
            setattr(holder, name, group)
            assert_refused(r"groups were replaced in part", loss_of, model, batch)
            setattr(holder, name, kept)
        assert torch.equal(loss_of(model, batch), expected)


def block_alone(rank: int, world_size: int) -> None:
    """Megatron's block recomputes by its flags, which only a language model hides from it."""
    harness.start(plain())
    declare_batch_layout(dist_group(), "contiguous")
    for row in (plain(config=FULL), plain(checkpoint="remat")):
        block = harness.model_of(row).decoder
        hidden = torch.randn(4, 1, block.config.hidden_size, dtype=torch.float64, requires_grad=True)
        COUNTERS.reset()
        out = block(hidden, None)
        if "recompute_method" in row.config:
            with pytest.raises(UnsupportedError, match=r"full in a block of layers outside a language model.*'remat'"):
                out.sum().backward()
        else:
            out.sum().backward()
            assert COUNTERS.attention_forwards == LAYERS


def evaluate_and_freeze(rank: int, world_size: int) -> None:
    for layout in ("contiguous", "boundary"):
        row = plain(layout, "remat")
        harness.start(row)
        batch, model = next(harness.batches(row)), harness.model_of(row)
        COUNTERS.reset()
        trained = loss_of(model, batch)
        assert COUNTERS.remat_bytes > 0
        COUNTERS.reset()
        with torch.no_grad():
            evaluated = loss_of(model.eval(), batch)
        assert torch.equal(trained, evaluated)
        del trained
        assert (COUNTERS.attention_forwards, COUNTERS.remat_bytes) == (LAYERS, 0)

        gradients = {}
        for checkpoint in ("remat", "none"):
            model = harness.model_of(plain(layout, checkpoint))
            for parameter in model.embedding.parameters():
                parameter.requires_grad_(False)
            loss_of(model, batch).backward()
            gradients[checkpoint] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        held = living()
        assert (held["frames"], held["regions"], held["pairs"], remat.active_frame()) == (0, 0, 0, None)
        assert all(gradient is not None for gradient in gradients["remat"].values()), "a frozen embedding cuts"
        for name, gradient in gradients["none"].items():
            torch.testing.assert_close(gradients["remat"][name], gradient, rtol=1e-5, atol=1e-7)


def says(rank: int, world_size: int) -> list[str]:
    row = plain(config=FULL)
    harness.start(row)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("dfa_megatron.megatron")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    model = harness.model_of(row)
    for step in range(2):
        loss_of(model, next(harness.batches(row, step))).backward()
    log.removeHandler(handler)
    return lines


def test_the_first_rank_says_once_what_runs_evaluation_keeps_nothing_and_foreign_batches_are_refused() -> None:
    refused = (wrong_batches, uncut_batches, foreign_packs, whole_batches, swapped, block_alone)
    (first, second), *_ = run_each(2, says, evaluate_and_freeze, *refused, timeout=120)
    assert len(first) == 1
    assert "distributed attention over 2 context-parallel ranks, layout contiguous, schedule auto" in first[0]
    assert "layers are recomputed without their attention" in first[0]
    assert second == []


def shim_twice(rank: int, world_size: int) -> None:
    use_cpu()
    patched = (torch.cuda.current_device, torch.empty, torch.Tensor.type)
    use_cpu()
    assert (torch.cuda.current_device, torch.empty, torch.Tensor.type) == patched
    assert torch.empty(1, device="cuda", pin_memory=True).device.type == "cpu"


def test_the_cpu_stand_in_is_never_applied_beside_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert_refused("use_cpu on a machine with CUDA", use_cpu)


def one_config(rank: int, world_size: int) -> None:
    """Build three models from one config object, the last of Megatron's own layers; each recomputes as it was asked."""
    row = plain(config=FULL | {"mtp_num_layers": 1})
    harness.start(row)
    config = harness.config_of(row)
    before = dict(vars(config))
    batch = whole_batch()
    checkpoint, calls = tensor_parallel.checkpoint, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return checkpoint(*args)

    tensor_parallel.checkpoint = counted
    try:
        for asked, forwards in (("auto", 1), ("none", 2), ("auto", 1)):
            COUNTERS.reset()
            ours = harness.model_of(plain("contiguous", asked, options={"loss_tile": 8}), config)
            loss_of(ours, batch).backward()
            assert COUNTERS.snapshot()["attention_forwards"] == forwards * (LAYERS + 1)
        del calls[:]
        mask = torch.ones(1, 1, 48, 48).triu(1).bool()
        own = harness.model_of(row.alone(), config)
        own(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"]).mean().backward()
        assert len(calls) == LAYERS + 1
        assert not hasattr(own.decoder.layers[0], "dfa_check_positions")
    finally:
        tensor_parallel.checkpoint = checkpoint
    assert dict(vars(config)) == before
    assert hasattr(ours, WATCHED)
    assert not hasattr(own, WATCHED)
    ours.decoder.config.timers = "later"  # of the same fields
    assert config.timers == "later"
    config = harness.config_of(like("heterogeneous", config=FULL))
    spec = distribute_attention(megatrons_spec(config), config=MegatronConfig())
    own = GPTModel(config, spec, VOCABULARY, 48).double().train()
    COUNTERS.reset()
    loss_of(own, batch).backward()
    assert COUNTERS.attention_forwards == sum(hasattr(x.self_attention, "core_attention") for x in own.decoder.layers)


def test_the_config_of_a_model_is_not_written_and_other_models_of_it_recompute_as_asked() -> None:
    run_each(1, shim_twice, one_config)
