"""What crosses a model's door in layout `boundary`: ids in and losses out, or hidden states once, and no logits.

Inside of a model tokens are exchanged between layouts, and rotary tables have the rows of their tokens.
"""

from __future__ import annotations

import inspect
import random
import re
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.megatron import door
from dfa_megatron.megatron.layers.rotary import order_rotary
from dfa_megatron.megatron.stand_in import use_cpu
from dfa_megatron.megatron.tokens.packs import Pack
from dfa_megatron.megatron.tokens.visit import Exchange, Visit, running
from dfa_megatron.plan.language.layout import zigzag_documents
from tests.frameworks import megatron_harness as harness
from tests.frameworks.compare import assert_gradients, gradients_of
from tests.frameworks.megatron_rows import BLOCK, like
from tests.fuzz.frameworks.megatron_draw import VOCABULARY, MegatronDraw
from tests.megatron.attends import positions
from tests.support.arguments import assert_refused
from tests.support.workers import over_ranks, run_each, run_ranks

BATCH, SEQUENCE, HIDDEN = 2, 48, 64
ROWS = SEQUENCE // 2 * BATCH
WHOLE = like("plain").global_batch(0)[0]


def cut(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's rows, as Megatron cuts them over the context-parallel ranks."""
    ranks, rank = (getattr(parallel_state, f"get_context_parallel_{n}")() for n in ("world_size", "rank"))
    return whole.index_select(dim, positions("zigzag", whole.shape[dim], ranks, rank))


def split(rows: torch.Tensor, model: Any) -> torch.Tensor:
    """This rank's part of them under sequence parallelism."""
    if not model.config.sequence_parallel:
        return rows
    return rows.chunk(model.pg_collection.tp.size())[model.pg_collection.tp.rank()]


def step(
    row: MegatronDraw, way: str, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
    """Result of this rank's tokens; gradients of its embeddings, and of parameters, summed over the sequence."""
    model = model or harness.model_of(row)
    batch = {name: cut(x, 1) for name, x in WHOLE.items()}
    ones = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool() if row.options is None and row.tp == 1 else None
    given: dict[str, Any] = {"labels": batch["labels"]} if way in ("labels", "embeddings") else {}
    if way == "embeddings":
        draw = torch.Generator().manual_seed(5)
        whole = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=draw, dtype=torch.float64)
        given["decoder_input"] = split(cut(whole, 0), model).clone().requires_grad_()
    if way == "processor":
        given |= {"labels": batch["labels"], "output_processor": processed, "output_processor_context": batch}
    model.post_process = way != "states"
    out = model(batch["tokens"], batch["position_ids"], ones, **given)
    weight = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(7))
    rows = out if way == "states" else out.transpose(0, 1)
    weights = cut(weight[..., : out.shape[-1]] if rows.dim() == 3 else weight[..., 0], 0)
    (rows * (split(weights, model) if way == "states" else weights)).sum().backward()
    given = {} if "decoder_input" not in given else {"embeddings": given["decoder_input"].grad}
    return rows.detach(), given.get("embeddings"), gradients_of(model, model.cp_group)


def processed(
    hidden_states: torch.Tensor, output_layer: Any, labels: Any, input_ids: Any, context: Any, **_: Any
) -> Any:
    """A caller's own head, which finds everything in its own order."""
    assert torch.equal(labels, context["labels"])
    assert torch.equal(input_ids, context["tokens"])
    return output_layer(hidden_states)[0].transpose(0, 1)


def in_order(rank: int, ranks: int, row: MegatronDraw) -> None:
    """Compare what a caller sees of every way with Megatron's own model on one rank."""
    ways = ["logits", "embeddings", "states", "labels"]
    ways += ["processor"] if "output_processor" in inspect.signature(GPTModel.forward).parameters else []
    alone = row.alone(tp=row.tp)
    harness.start(alone)
    wanted = {way: step(alone, way) for way in ways}
    harness.start(row)
    for way in ways:
        rows, embeddings, gradients = step(row, way)
        whole, whole_embeddings, whole_gradients = wanted[way]
        for mine, theirs in ((rows, whole), (embeddings, whole_embeddings)):
            if mine is None or theirs is None:
                continue
            expected = cut(theirs, 0)
            if len(mine) < len(expected):
                expected = expected.chunk(row.tp)[dist.get_rank() % row.tp]
            error = (mine - expected).abs().max() / expected.abs().max()
            assert error <= 1e-5, f"{row.name} {way}: {tuple(mine.shape)} is off by {error:.2e}"
        assert gradients.keys() == whole_gradients.keys()
        if row.tp == 1:
            assert_gradients(gradients, whole_gradients, f"{row.name} {way}")


@pytest.mark.support("megatron", "logits, given embeddings, hidden states and losses in the caller's order, CP 2, TP 2")
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"tp": 2, "cp": 2}], ids=["cp2", "tp2-cp2-sequence-parallel"])
def test_a_caller_finds_its_own_order_in_all_that_a_model_returns(sizes: dict[str, int]) -> None:
    row = like("plain", sizes, "boundary")
    run_ranks(row.ranks, in_order, row)


def sent(rank: int, ranks: int) -> None:
    """Count the bytes of every all-to-all: three integers of a token in, one float out, one back.

    Each rank keeps half of its tokens.
    """
    row = like("plain", {"cp": ranks}, "boundary", dtype="float32 of few layers")
    harness.start(row)
    model, moved = harness.model_of(row), []
    real = dist.all_to_all_single

    def counting(out: Any, rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        moved.append(rows.nbytes)
        return real(out, rows, *args, **kwargs)

    step(row, "labels", model)  # rotary tables are exchanged once
    dist.all_to_all_single = counting
    try:
        step(row, "labels", model)
        assert moved == [3 * ROWS * 4, ROWS * 2, ROWS * 2]
        moved.clear()
        with torch.no_grad():
            tokens = cut(WHOLE["tokens"], 1)
            assert model(tokens, None, None).shape == (BATCH, SEQUENCE // 2, VOCABULARY)
        assert moved == [ROWS * 4, ROWS * HIDDEN * 2]
    finally:
        dist.all_to_all_single = real


def refused(rank: int, ranks: int) -> None:
    row = like("plain", {"cp": ranks}, "boundary")
    model, bare = harness.model_of(row), harness.model_of(row).decoder
    rows = torch.randn(SEQUENCE // ranks, BATCH, HIDDEN, dtype=torch.float64)
    assert_refused(r"layers outside a language model in layout boundary.*LanguageModule", bare, rows, None)
    batch = {name: cut(x, 1) for name, x in WHOLE.items()}

    def call(**more: Any) -> Any:
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **more)

    for name in ("inference_context", "inference_params"):
        assert_refused(f"{name} in a distributed model.*--context-parallel-size 1", call, **{name: object()})
    with pytest.raises(UnsupportedError, match="the block's argument extract_layer_indices"):
        call(extra_block_kwargs={"extract_layer_indices": {0}})
    some_kept = harness.model_of(like("plain", {"cp": ranks}, "boundary", config={"num_moe_experts": 2} | BLOCK))
    with nullcontext() if door._KEEPS_MASKS else pytest.raises(UnsupportedError, match="padding_mask beside experts"):
        some_kept(batch["tokens"], batch["position_ids"], None, padding_mask=batch["tokens"] == 0)
    with pytest.raises(UnsupportedError, match="overlap_moe_expert_parallel_comm without labels"):
        model.build_schedule_plan(batch["tokens"], batch["position_ids"], None)
    losses = call()

    class Wrapped(GPTModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return {"loss": super().forward(*args, **kwargs), "mean": torch.ones(())}

    class Other(GPTModel):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            return object()

    model.__class__ = Wrapped
    assert torch.equal(call()["loss"], losses)
    model.__class__ = Other
    assert_refused("a language model that returns object", model, batch["tokens"], labels=batch["labels"])
    assert_refused("did not call its output layer", model, batch["tokens"])
    assert_refused(r"by place of Other\.forward", model, batch["tokens"], None, None)
    model.__class__ = GPTModel
    with pytest.raises(TypeError, match="no_such_argument"):
        call(no_such_argument=1)
    assert torch.equal(losses, call()), "a call that failed leaves nothing behind"


def replaced(rank: int, ranks: int) -> None:
    """A trainer sets another forward on a model, whose tokens then do not come through its door."""
    for name, layout in (("ahead", "contiguous"), ("ahead", "zigzag"), ("packed ahead", "contiguous")):
        row = like(name, {"cp": ranks}, layout)
        harness.start(row)
        model = harness.model_of(row)
        batch = harness.taken(harness.batch_of(row, parallel_state.get_context_parallel_group()))
        model(**batch)
        model.forward = MethodType(GPTModel.forward, model)
        assert_refused("layers outside a language model with prediction layers", model, **batch)


def other_weights(rank: int, ranks: int) -> None:
    """Draw weights that the second rank changes; experts are other ones on every rank."""
    layout = "boundary"
    row, draw = like("experts", {"cp": ranks, "ep": ranks}, layout), random.Random(layout)
    harness.start(row)
    model = harness.model_of(row)
    held = {name: x for name, x in model.named_parameters() if getattr(x, "allreduce", True)}
    experts = [x for name, x in model.named_parameters() if name not in held]
    batch = {name: cut(x, 1) for name, x in WHOLE.items()}
    for name in draw.sample(sorted(held), 5):
        parameter = held[name]
        row, change = draw.choice((0, -1)), draw.choice((1e-3, float("nan")))
        parameter.data[row] += change if rank else 0
        said = rf"other weights: {re.escape(name)} is the first that differs, between rank 0 and rank 1"
        with pytest.raises(DisagreementError, match=said):
            model(batch["tokens"], batch["position_ids"], None)
        dist.broadcast(parameter.data, 0)
    assert experts, "experts over ranks"
    for expert in experts:
        expert.data += rank
    model(batch["tokens"], batch["position_ids"], None)
    held[name].data += rank
    model(batch["tokens"], batch["position_ids"], None)  # compared once
    unseen = harness.model_of(like("experts", {"cp": ranks, "ep": ranks}, layout, options={"verify": "off"}))
    unseen.decoder.layers[0].mlp.linear_fc1.weight.data += rank
    unseen(batch["tokens"], batch["position_ids"], None)


def test_what_crosses_the_door_is_counted_what_cannot_is_refused_and_ranks_with_other_weights_hear_which() -> None:
    run_each(2, sent, refused, replaced, other_weights, timeout=120)


@over_ranks(3)
def test_an_exchange_and_its_gradient_on_real_ranks(rank: int, world_size: int) -> None:
    exchange = Exchange(dist.group.WORLD)
    generator = torch.Generator().manual_seed(world_size)
    length = 4 * world_size
    whole, weight = torch.randn(2, length, 2, 3, generator=generator, dtype=torch.float64)
    mine = {name: positions(name, length, world_size, rank) for name in ("zigzag", "contiguous")}
    rows = whole[mine["zigzag"]].requires_grad_()
    moved = exchange(rows, "zigzag", "contiguous")
    assert torch.equal(moved, whole[mine["contiguous"]])
    assert moved._base is None  # a pipeline schedule frees outputs that are no views
    assert torch.equal(exchange(moved, "contiguous", "zigzag"), rows)
    (moved * weight[mine["contiguous"]]).sum().backward()
    assert torch.equal(rows.grad, weight[mine["zigzag"]])

    for end in range(1, length + 1):  # every pack has plans of its own
        documents = zigzag_documents((0, end, length), world_size)
        if documents.tokens(rank) == len(rows):
            exchange.move(rows.detach(), documents, "contiguous")
    kept = {id(x): x for plan in exchange._plans.values() for x in (*plan.before, *plan.after) if torch.is_tensor(x)}
    assert sum(x.nbytes for x in kept.values()) <= 8 * 32 * len(rows), "of eight packs"
    assert torch.equal(exchange(rows, "zigzag", "contiguous"), moved), "a plan is made again"


class Numbers(torch.nn.Module):
    """A table of token numbers."""

    def forward(self, length: int, offset: int = 0) -> torch.Tensor:
        return torch.arange(offset, offset + length)


def call(tokens: int, pack: Pack | None = None) -> Any:
    """The call of a model whose ranks hold so many tokens each."""
    group = dist.group.WORLD
    assert group is not None
    return running(Visit(None, group, "contiguous", "contiguous", pack, (1, tokens), Exchange(group)))


def _rows_of_lengths_and_offsets(rank: int, ranks: int) -> list[list[int]]:
    use_cpu()
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    made = [
        YarnRotaryEmbedding(
            8, scaling_factor=4.0, original_max_position_embeddings=16, use_cpu_initialization=True, cp_group=group
        )
        for group in (dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True))
    ]
    owner, whole = torch.nn.Module(), made[1]
    owner.rotary_pos_emb = made[0]
    for _ in range(2):  # as often as one likes
        order_rotary(owner)
    for length in (8, 48, 24, 24, 48):  # shorter and longer than what it was built for, and than the last
        with call(length // ranks):
            table, factor = owner.rotary_pos_emb(length)
            parts = owner.rotary_pos_emb.get_cached_cos_sin(length, dtype=torch.float64)
        expected = whole(length)[0].chunk(ranks)[rank]
        assert factor == whole(length)[1]
        assert torch.equal(table, expected), length
        for part, wanted in zip(parts, (expected.cos() * factor, expected.sin() * factor), strict=True):
            assert torch.equal(part, wanted.double()), length
    assert torch.equal(owner.rotary_pos_emb(48)[0], whole(48)[0]), "outside of a call it is whole"
    with torch.inference_mode(), call(8):
        owner.rotary_pos_emb(16)
    with call(8):  # the rows that an evaluation made serve training
        (torch.ones(8, 1, 1, 8, requires_grad=True) * owner.rotary_pos_emb(16)[0]).sum().backward()

    owner.rotary_pos_emb = Numbers()
    order_rotary(owner)
    rows = []
    for length, offset, pack in ((4, 0, None), (4, 6, None), (4, 6, None), (8, 6, None), (8, 0, Pack((0, 3, 8)))):
        with call(length // ranks, pack):
            rows.append(owner.rotary_pos_emb(length, offset=offset).tolist())
    with call(4), pytest.raises(UnsupportedError, match=r"a rotary table of shape \(4,\) for 8 positions"):
        owner.rotary_pos_emb(4)
    return rows


def test_a_rotary_table_is_of_this_ranks_tokens_and_known_by_its_length_its_offset_and_its_documents() -> None:
    assert run_ranks(2, _rows_of_lengths_and_offsets) == [
        [[0, 1], [6, 7], [6, 7], [6, 7, 8, 9], [0, 1, 2, 0]],
        [[2, 3], [8, 9], [8, 9], [10, 11, 12, 13], [1, 2, 3, 4]],
    ]


def test_an_attention_without_a_module_for_its_table_is_refused() -> None:
    assert_refused("whose rows could be chosen", order_rotary, torch.nn.Module())
