"""Micro-batches with a context-parallel group of their own come to what Megatron's attention does on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from tests.megatron import attends, harness, padded_packs
from tests.megatron.harness import Case, Topology
from tests.megatron.kinds import LATENT, UNBALANCED
from tests.support.workers import run_ranks

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
        tokens = torch.randint(0, harness.VOCABULARY, (2, 1, length), generator=generator)
        ends = torch.tensor([[0, *accumulate(self.lengths)]], dtype=torch.int32)
        more = {"position_ids": torch.arange(length)[None], "loss_mask": torch.ones(1, length)}
        tree = {"prompt_tree": (self.lengths, self.parents), "at": more["position_ids"]}
        seen = tree if self.parents else {"cu_seqlens": ends}
        return {"tokens": tokens[0], "labels": tokens[1], **seen, **more}


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
WHOLE = (Micro((0,), (10,)), Micro((1,), (6,)), Micro((2, 3), (8,)), Micro((0, 1, 2, 3), (24,)))
"""One document each, in Megatron-Core 0.16's format for them, with which it slices the rotary table itself."""


def params_of(batch: dict[str, Any], micro: Micro, groups: Groups, form: str) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    size = len(micro.ranks)
    named = {"local_cp_size": size, "cp_group": groups[micro.ranks] if size > 1 else None}
    if "params" not in batch:
        ends = batch["cu_seqlens"][0]
        longest = max(micro.lengths)
        cu_seqlens = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        return PackedSeqParams(form, **cu_seqlens, **named)
    vars(batch["params"]).update(named)
    return batch["params"]


def cut(batch: dict[str, Any], micro: Micro, groups: Groups, me: int, model: Any, form: str) -> dict[str, Any]:
    """This rank's tokens: of rows, or of every document by itself."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    size = len(micro.ranks)
    if form == "padded":
        total = padded_packs.total_of(batch["tokens"].shape, size, 1)
        local = padded_packs.cut(batch, size, micro.ranks.index(me), total, sum(micro.lengths) % 2)
        params_of(local, micro, groups, form)
        return local
    named = {"local_cp_size": torch.tensor(size), "hybrid_cp_group": groups[micro.ranks] if size > 1 else None}
    local = shard_batch({**batch, **named}, parallel_state.get_context_parallel_group(), model.dfa)
    return local if form == "thd" else {**local, "packed_seq_params": params_of(batch, micro, groups, form)}


def run(model: Any, micros: tuple[Micro, ...], groups: Groups, me: int, form: str) -> tuple[list[Any], list[Any]]:
    """This rank's losses of tokens in each of its micro-batches, and the sum of all ranks' gradients."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    losses = []
    for micro in (micro for micro in micros if me in micro.ranks):
        batch = micro.batch()
        if model.dfa is None:
            out = attends.alone(batch, model)
            weight = 1 / len(micro.ranks)  # each of its ranks computes all of it
        else:
            batch, weight = cut(batch, micro, groups, me, model, form), 1.0
            out = model(**harness.taken(batch, position_ids=None))
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(weight))
        ((out * batch["loss_mask"]).sum() * weight).backward()
        losses.append((out.detach(), batch))
    gradients = []
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=groups[()])
        if getattr(parameter, "sequence_parallel", False):  # as Megatron does for norms, which see a part of the tokens
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        gradients.append(parameter.grad)
    return losses, gradients


def model_of(topology: Topology, options: MegatronConfig | None, config: Any) -> Any:
    """The harness's model; `dfa` holds our options."""
    harness.seed()
    changes = {"num_layers": 2, **(OURS if options else {"sequence_parallel": False}), **dict(config)}
    model = harness.make_model(harness.make_config(topology, Case(options), **changes), options)
    model.train()
    model.dfa = options
    return model


def groups_of(micros: tuple[Micro, ...], tp: int) -> Groups:
    """Process groups, made once: global ranks of the same tensor-parallel rank; () is all of them."""
    found: Groups = {}
    for ranks in dict.fromkeys([(), *(micro.ranks for micro in micros if len(micro.ranks) > 1)]):
        for shift in range(tp):
            members = [rank * tp + shift for rank in ranks or range(dist.get_world_size() // tp)]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                found[ranks] = group
    return found


def compare(rank: int, world_size: int, cases: list[Any]) -> None:
    for topology, micros, config, ways in cases:
        apart = Topology(tp=topology.tp, dp=world_size // topology.tp)
        harness.start(apart)
        groups, me = groups_of(micros, topology.tp), rank // topology.tp
        expected = run(model_of(apart, None, config), micros, groups, me, "thd")
        if topology.cp > 1:
            harness.start(topology)
        known = 0
        for layout, checkpoint, form in ways:
            options = MegatronConfig(data_layout=layout, checkpoint=checkpoint)
            COUNTERS.reset()
            where = f"{topology} {layout} {checkpoint} {form} on rank {rank}"
            losses, gradients = run(model_of(topology, options, config), micros, groups, me, form)
            assert (COUNTERS.snapshot()["replays"] > 0) == (checkpoint == "remat"), where
            known = known or len(dist.distributed_c10d._world.pg_map)
            assert len(dist.distributed_c10d._world.pg_map) == known, "groups are made once"
            for (got, batch), (whole, _) in zip(losses, expected[0], strict=True):
                real = batch["loss_mask"].bool()
                at = batch.get("at", batch["position_ids"])[real]
                torch.testing.assert_close(got[real], whole[0, at], atol=1e-5, rtol=0, msg=where)
            for got, want in zip(gradients, expected[1], strict=True):
                assert (got - want).abs().max() <= 1e-5 * want.abs().max(), where
            dist.barrier()


@pytest.mark.support("megatron", "context-parallel size per micro-batch: 1, 2, 3, 4")
def test_sizes_alternate_from_micro_batch_to_micro_batch_while_other_ranks_run_others() -> None:
    rows = [("boundary", "remat", "thd"), ("zigzag", "remat", "thd")]
    sliced = [("contiguous", "none", "sbhd"), ("boundary", "remat", "sbhd"), ("zigzag", "remat", "sbhd")]
    cases = [
        # The padded way first: nobody has declared yet how batches are cut.
        (Topology(dp=4), EVERY_SIZE, (), [("boundary", "remat", "padded"), ("contiguous", "remat", "thd")]),
        (Topology(cp=2, dp=2), EVERY_SIZE[4:10], (), rows),
        (Topology(dp=4), EVERY_SIZE[4:10], LATENT, [("contiguous", "remat", "thd")]),
        (Topology(dp=4), WHOLE, (), sliced),
        (Topology(dp=4), WHOLE, UNBALANCED, [("boundary", "remat", "thd")]),
        (Topology(tp=2, dp=2), TWO_SIZES, (), [("contiguous", "remat", "thd")]),
    ]
    run_ranks(4, compare, cases, timeout=170)


def refused(rank: int, world_size: int) -> None:
    from dfa_megatron.megatron import declare_batch_layout

    harness.start(Topology(dp=3))
    pair, others = dist.new_group([0, 1]), dist.new_group([1, 2])
    options = MegatronConfig(data_layout="contiguous")
    model = model_of(Topology(dp=3), options, ())
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
        with pytest.raises(UnsupportedError, match=message):
            forward((5, 7), **changes)
    if rank != 1:
        with pytest.raises(UnsupportedError, match="this rank has none of its tokens"):
            forward((5, 7), groups={(0, 1): others if rank == 0 else pair})
    losing = model_of(Topology(dp=3), options, (*UNBALANCED, ("moe_z_loss_coeff", 0.1)))
    with pytest.raises(UnsupportedError, match="a router's losses"):
        forward((5, 7), on=losing)
    dist.barrier()
    if rank < 2:
        with pytest.raises(DisagreementError):
            forward((5, 7) if rank else (4, 8))


def test_a_group_that_does_not_fit_is_refused_on_every_rank_and_other_packs_in_a_group_are_an_error() -> None:
    run_ranks(3, refused, timeout=60)
