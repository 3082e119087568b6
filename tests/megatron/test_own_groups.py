"""Micro-batches with a context-parallel group of their own come to what Megatron's attention does on one rank."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from dfa_megatron import plan_batches
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.megatron import declare_batch_layout, shard_batch
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import compare
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import UNBALANCED, like
from tests.fuzz.frameworks.megatron_draw import VOCABULARY, MegatronDraw
from tests.fuzz.frameworks.one_rank import apart
from tests.megatron import padded_packs
from tests.support.arguments import assert_refused
from tests.support.workers import by_turns, over_ranks, run_ranks

OURS = {"hybrid_context_parallel": True}
Groups = dict[tuple[int, ...], dist.ProcessGroup]


@dataclass(frozen=True)
class Micro:
    """One micro-batch: its ranks, among those that hold other tokens, and the lengths of its documents."""

    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    parents: tuple[int, ...] = ()
    """Of the segments of a tree, in place of documents."""

    def batch(self) -> dict[str, Any]:
        """The whole micro-batch, which only its own ranks know."""
        length = sum(self.lengths)
        generator = torch.Generator().manual_seed(length * 8 + self.ranks[0])
        tokens = torch.randint(0, VOCABULARY, (2, 1, length), generator=generator)
        ends = torch.tensor([[0, *accumulate(self.lengths)]], dtype=torch.int32)
        more = {"position_ids": torch.arange(length)[None], "loss_mask": torch.ones(1, length)}
        seen: dict[str, Any] = {"prompt_tree": (self.lengths, self.parents)} if self.parents else {"cu_seqlens": ends}
        return {"tokens": tokens[0], "labels": tokens[1], "at": more["position_ids"], **seen, **more}


EVERY_SIZE = (
    Micro((0,), (3, 7)), Micro((1,), (12,)), Micro((2,), (5, 1, 2)), Micro((3,), (9,)),
    Micro((0, 1), (5, 14, 1)), Micro((2, 3), (16,)),
    Micro((0, 1, 2, 3), (11, 2, 19)),
    Micro((3,), (4, 6)), Micro((3,), (8,)), Micro((0, 1, 2), (7, 23)),  # rank 3 runs two meanwhile
    Micro((0,), (3, 7)), Micro((1, 2), (1, 8, 3)), Micro((3,), (10,)),
    Micro((2, 3), (13, 3)), Micro((0, 1), (24,)),
)  # fmt: skip
TWO_SIZES = (
    Micro((0,), (3, 7)), Micro((1,), (8,)), Micro((0, 1), (5, 8, 1, 2), (-1, 0, 1, 0)), Micro((1,), (2, 2), (-1, 0)),
    Micro((0,), (2, 8)),
)  # fmt: skip
SAMPLES = (40, 22, 13, 12, 11, 9, 9, 5, 4, 3, 2, 1)
PLANNED = tuple(
    Micro(tuple(group.ranks), tuple(SAMPLES[sample] for sample in group.samples))
    for batch in plan_batches(SAMPLES, 4, 12, (1, 2, 4))
    for group in batch
)
WHOLE = (Micro((0,), (10,)), Micro((1,), (6,)), Micro((2, 3), (8,)), Micro((0, 1, 2, 3), (24,)))
"""One document each, in Megatron-Core 0.16's format for them, with which it slices the rotary table itself."""


THREE = (Micro((0, 1), (1, 1, 7, 26, 1)), Micro((2,), (5, 9)), Micro((0, 1, 2), (2, 19, 15)))


def params_of(batch: dict[str, Any], micro: Micro, groups: Groups, form: str) -> Any:
    size = len(micro.ranks)
    named = {"local_cp_size": size, "cp_group": groups[micro.ranks] if size > 1 else None}
    if "params" not in batch:
        ends = batch["cu_seqlens"][0]
        longest = max(micro.lengths)
        cu_seqlens = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        return PackedSeqParams(form, **cu_seqlens, **named)
    vars(batch["params"]).update(named)
    return batch["params"]


def cut(batch: dict[str, Any], micro: Micro, groups: Groups, me: int, row: MegatronDraw, form: str) -> dict[str, Any]:
    """This rank's tokens: of rows, or of every document by itself."""
    size = len(micro.ranks)
    if form == "padded":
        total = padded_packs.total_of(batch["tokens"].shape, size, 1)
        local = padded_packs.cut(batch, size, micro.ranks.index(me), total, sum(micro.lengths) % 2)
        params_of(local, micro, groups, form)
        return local
    named = {"local_cp_size": torch.tensor(size), "hybrid_cp_group": groups[micro.ranks] if size > 1 else None}
    options = harness.options_of(row)
    local = shard_batch({**batch, **named}, parallel_state.get_context_parallel_group(), options)
    return local if form == "thd" else {**local, "packed_seq_params": params_of(batch, micro, groups, form)}


def run(model: Any, row: MegatronDraw, micros: tuple[Micro, ...], groups: Groups, form: str) -> tuple[Any, Any]:
    """This rank's losses of tokens in each of its micro-batches, and the sum of all ranks' gradients."""
    losses, me = [], dist.get_rank() // row.tp
    for micro in (micro for micro in micros if me in micro.ranks):
        batch = micro.batch()
        weight = 1 / len(micro.ranks) if row.options is None else 1.0  # each of its ranks computes all of it
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(weight))
        # Megatron's DDP divides the gradients by the ranks, unless the loss is per token.
        summed = row.options is not None and row.config.get("calculate_per_token_loss")
        MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0 if summed else 1 / len(micro.ranks)))
        if row.options is None:
            pack = "tree" if micro.parents else "rows"
            with apart() if pack == "rows" else contextlib.nullcontext():
                given = {**batch, "ends": tuple(accumulate(micro.lengths))}
                out = harness.alone(dataclasses.replace(row, pack=pack), given, model)
                ((out * batch["loss_mask"]).sum() * weight).backward()
        else:
            batch = cut(batch, micro, groups, me, row, form)
            places = {} if model.config.mtp_num_layers else {"position_ids": None}
            out = model(**harness.taken(batch, model, **places))
            (out * batch["loss_mask"]).sum().backward()
        losses.append((out.detach(), batch))
    gradients = compare.gradients_of(model, groups[()])
    for name, parameter in model.named_parameters():
        if getattr(parameter, "sequence_parallel", False):  # as Megatron does for norms, which see a part of the tokens
            dist.all_reduce(gradients[name], group=model.pg_collection.tp)
    return losses, gradients


def groups_of(micros: tuple[Micro, ...], tp: int) -> Groups:
    """Process groups: global ranks of the same tensor-parallel rank; () is all of them."""
    found: Groups = {}
    for ranks in dict.fromkeys([(), *(micro.ranks for micro in micros if len(micro.ranks) > 1)]):
        for shift in range(tp):
            members = [rank * tp + shift for rank in ranks or range(dist.get_world_size() // tp)]
            group = harness.group_of(*members)
            if dist.get_rank() in members:
                found[ranks] = group
    return found


def check(rank: int, world_size: int, cases: list[Any]) -> None:
    for first, micros, ways in cases:
        alone, known = first.alone(tp=first.tp), 0
        harness.start(alone)
        groups = groups_of(micros, first.tp)
        with harness.with_layers(first), torch.compiler.set_stance("force_eager"):
            expected = run(harness.model_of(alone), alone, micros, groups, "thd")
            for layout, checkpoint, form in ways:
                asked = {"data_layout": layout, "checkpoint": checkpoint}
                row = dataclasses.replace(first, options=asked, name=f"{first.name} {asked} {form} on rank {rank}")
                harness.start(row)
                COUNTERS.reset()
                model = harness.model_of(row, harness.config_of(row, **OURS))
                losses, gradients = run(model, row, micros, groups, form)
                assert (COUNTERS.snapshot()["reused"] > 0) == (checkpoint == "remat"), row.name
                known = known or len(dist.distributed_c10d._world.pg_map)
                assert len(dist.distributed_c10d._world.pg_map) == known, "groups are made once"
                for (got, batch), (whole, _) in zip(losses, expected[0], strict=True):
                    real = batch["at"] >= 0
                    torch.testing.assert_close(got[real], whole[0, batch["at"][real]], atol=1e-5, rtol=0, msg=row.name)
                compare.assert_gradients(gradients, expected[1], row.name)
                dist.barrier()


@pytest.mark.timeout(300)  # a minute alone
@pytest.mark.support("megatron", "context-parallel size per micro-batch: 1, 2, 3, 4")
def test_sizes_alternate_from_micro_batch_to_micro_batch_while_other_ranks_run_others() -> None:
    four, rows = {"dp": 4}, [("boundary", "remat", "thd"), ("zigzag", "remat", "thd")]
    sliced = [("contiguous", "none", "sbhd"), ("boundary", "remat", "sbhd"), ("zigzag", "remat", "sbhd")]
    both = [("boundary", "none", "padded"), ("contiguous", "remat", "thd")]
    cases = [
        (like("plain", four), EVERY_SIZE, [("boundary", "remat", "padded")]),
        (like("latent", four), PLANNED, both[1:]),
        (like("ahead", four), EVERY_SIZE[4:10], both[1:]),
        (like("ahead per token", four), EVERY_SIZE[4:10], both[:1]),
        (like("plain", four), WHOLE, sliced),
        (like("packed experts", four), WHOLE, rows[:1]),
        (like("plain", {"cp": 2, "dp": 2}), EVERY_SIZE[4:10], rows),
        (like("plain", {"tp": 2, "dp": 2}), TWO_SIZES, both[1:]),
    ]
    run_ranks(4, check, cases, timeout=280)


@pytest.mark.support("megatron", "hybrids with a context-parallel size per micro-batch: 1, 2, 3")
def test_states_pass_among_the_ranks_that_share_a_micro_batch_while_others_run_another() -> None:
    ways = [("boundary", "remat", "padded"), ("contiguous", "remat", "thd"), ("boundary", "none", "padded")]
    cases = [(like(name, {"dp": 3}), THREE, by_turns(ways)) for name in ("stack", "packed delta")]
    run_ranks(3, check, cases, timeout=120)


@over_ranks(3)
def test_a_group_that_does_not_fit_is_refused_on_every_rank_and_other_packs_in_a_group_are_an_error(
    rank: int, ranks: int
) -> None:
    row = like("plain", {"dp": 3})
    harness.start(row)
    pair, others = dist.new_group([0, 1]), dist.new_group([1, 2])
    model = harness.model_of(row, harness.config_of(row, **OURS))
    declare_batch_layout(pair if rank < 2 else others, "contiguous")
    groups = {(0, 1): pair if rank < 2 else others, (): dist.group.WORLD}
    cut = {"tokens": torch.zeros(1, 6, dtype=torch.long), "labels": torch.zeros(1, 6, dtype=torch.long)}

    def forward(lengths: tuple[int, ...], groups: Groups = groups, on: Any = model, **changes: Any) -> None:
        params = params_of(Micro((0, 1), lengths).batch(), Micro((0, 1), lengths), groups, "thd")
        vars(params).update(changes)
        on(cut["tokens"], None, None, labels=cut["labels"], packed_seq_params=params)

    for changes, message in (
        ({"cp_group": None}, "local_cp_size=2 and no cp_group"),
        ({"local_cp_size": 3}, "local_cp_size=3 and a cp_group of 2 ranks"),
        ({"cp_group": None, "local_cp_size": 1}, "it ends at 12"),
    ):
        assert_refused(message, forward, (5, 7), **changes)
    if rank != 1:
        with pytest.raises(UnsupportedError, match="this rank has none of its tokens"):
            forward((5, 7), groups={(0, 1): others if rank == 0 else pair})
    losing = harness.model_of(row, harness.config_of(row, **OURS, **UNBALANCED | {"moe_z_loss_coeff": 0.1}))
    assert_refused("a router's losses", forward, (5, 7), on=losing)
    dist.barrier()
    if rank < 2:
        with pytest.raises(DisagreementError):
            forward((5, 7) if rank else (4, 8))
