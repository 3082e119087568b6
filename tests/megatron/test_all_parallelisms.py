"""Training with distributed attention equals Megatron-Core's own attention on one rank, whatever the topology."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dfa_megatron.config import MegatronConfig
from tests.megatron import harness, kinds
from tests.megatron.harness import Case, Topology, case
from tests.megatron.kinds import FULL, LOCAL, PADDED, REFERENCES
from tests.support.workers import run_ranks

ALONE, CP2, CP3, CP4, TP2 = Topology(), Topology(cp=2), Topology(cp=3), Topology(cp=4), Topology(tp=2)
TP2_CP2, PP2_CP2, CP2_DP2 = Topology(tp=2, cp=2), Topology(pp=2, cp=2), Topology(cp=2, dp=2)
EP2, CP2_DP2_EP2 = Topology(cp=2, ep=2), Topology(cp=2, dp=2, ep=2)

Training = tuple[Topology, Case, str]
"""Where, what, and the name of what one rank comes to."""


def like(
    reference: str, topology: Topology, layout: str = "contiguous", checkpoint: str = "none", steps: int = 1, **how: Any
) -> Training:
    """A training of the model of a reference."""
    model = REFERENCES[reference]
    more = {"config": model.config, "pairs": model.pairs, "masked": model.masked, **how}
    return topology, case(layout, checkpoint, steps=steps, **more), reference


def asked(reference: str, topology: Topology, recompute: Any = FULL, steps: int = 2, **options: Any) -> Training:
    """The same with other options of attention."""
    model = REFERENCES[reference]
    wanted = Case(MegatronConfig(**options), recompute=recompute, steps=steps)
    return topology, replace(wanted, config=model.config, pairs=model.pairs), reference


def selective(reference: str, layout: str, *modules: str) -> Training:
    """--recompute-granularity selective --recompute-modules ...: Megatron's own, attention runs once without us."""
    config = (("recompute_granularity", "selective"), ("recompute_modules", list(modules)))
    return like(reference, CP2, layout, steps=2, config=(*REFERENCES[reference].config, *config))


def padded(reference: str, topology: Topology, checkpoint: str = "auto") -> Training:
    """Documents that are padded and cut zigzag one by one."""
    return like(reference, topology, "boundary", checkpoint, config=PADDED[reference], padded=True)


def sharded(topology: Topology, layout: str, wrapper: str, checkpoint: str = "none", **how: Any) -> Training:
    """Fully sharded parameters."""
    more = {} if wrapper == "torch_fsdp2" else {"optimizer": "distributed", "overlap": True}
    return like("plain", topology, layout, checkpoint, steps=2, config=LOCAL, wrapper=wrapper, **more, **how)


FSDP2, FSDP, FSDP_OF_GRADIENTS = "torch_fsdp2", "megatron_fsdp:optim_grads_params", "megatron_fsdp:optim_grads"
ALIKE = "CP 2, 3, 4; layouts `contiguous`, `boundary`; recomputation ours and none"
OPTIMIZERS = "CP 2: distributed optimizer, experts (EP 2), selective recomputation, offload"
DATA = "CP 2 x DP 2, EP 2; fewer key/value groups than TP"
ROUTERS = "losses, z-loss and bias of routers, with padding_mask and uneven loss masks; CP 3"
AHEAD = "multi-token prediction; every layout, CP 3, TP 2 x CP 2, PP 2 x CP 2"
PACKS = "windows; packed documents; both; CP 1, 2, 3"
PACKS_IN_WINDOWS = "packs in windows, TP 2 x CP 2 and PP 2 x CP 2"
CUT_ONE_BY_ONE = "documents padded to 2 x CP and cut zigzag one by one: CP 2, 3, 4, TP, PP, EP"
TREES = "prompt trees, any mask; CP 3, TP, PP, EP"
OFFSETS = "learned and fixed softmax offsets; every layout, TP 2 x CP 2"
FULLY_SHARDED = "PyTorch's and Megatron's fully sharded parameters (FSDP)"
WHOLE_NORMS = (("sequence_parallel", False),)
"""Norms that are PyTorch's bear no sequence parallelism."""

GROUPS: dict[str, dict[str, list[Training]]] = {
    "recomputation": {
        "recomputation full, block, uniform; Megatron's own or ours": [
            like("plain", CP2, recompute=FULL),  # Megatron's own: every attention runs twice
            like("plain", CP2, "boundary", recompute=FULL),
            like("plain", CP2, checkpoint="auto", recompute=("block", 3)),
            like("plain", CP2, checkpoint="auto", recompute=("uniform", 2)),  # taken as 1
            like("plain", CP2, checkpoint="remat"),
            like("plain", CP2, "boundary", "remat", recompute=("block", 1)),
        ],
        OPTIMIZERS: [
            like("plain", CP2, checkpoint="auto", steps=3, overlap=True),
            like("plain", CP2, checkpoint="auto", steps=3, overlap=True, optimizer="distributed"),
            asked("plain", CP2, remat_offload=True),
            selective("plain", "contiguous", "mlp"),
            selective("experts", "boundary", "moe"),
            like("experts", EP2, "boundary", "auto", steps=2),
        ],
        "experts in every other layer": [like("experts", CP2, "boundary", "auto", steps=3, config=kinds.ALLTOALL)],
    },
    "layers": {
        OFFSETS: [
            like("learnable", CP2),
            like("learnable", CP2, "boundary", "auto"),
            like("off by one", CP2, "zigzag", "auto"),
            like("packed learnable", CP2, checkpoint="auto"),
        ],
        FULLY_SHARDED: [
            sharded(CP2, "contiguous", FSDP2, "auto"),
            sharded(CP2, "boundary", FSDP2, recompute=FULL),  # Megatron's own runs layers again from outside
            sharded(CP2, "contiguous", FSDP, "auto"),
            sharded(CP2, "boundary", FSDP, recompute=FULL),
            sharded(CP2, "boundary", FSDP_OF_GRADIENTS),
        ],
        "TP 2 without sequence parallelism": [
            like("plain", TP2, checkpoint="auto", config=(*WHOLE_NORMS, ("distribute_saved_activations", True))),
        ],
        ROUTERS: [like("balanced", TP2, checkpoint="auto")],
        CUT_ONE_BY_ONE: [padded("padded", CP2, "none")],
    },
    "odd-ranks": {
        ALIKE: [
            like("plain", CP3, checkpoint="auto", steps=harness.STEPS),
            like("plain", CP3, steps=2),
            like("plain", CP3, "boundary", steps=3),
            like("plain", CP3, "boundary", "auto", steps=2),
        ],
        "layout `zigzag`, CP 3": [like("plain", CP3, "zigzag", steps=3), like("plain", CP3, "zigzag", "auto")],
        ROUTERS: [
            like("balanced", CP3, checkpoint="auto"),
            like("balanced", CP3, "boundary", steps=2),
            like("balanced", CP3, "zigzag"),
            like("balanced per token", CP3, steps=2),
            like("balanced per token", CP3, "boundary", "auto"),
            like("biased", CP3, steps=3),
        ],
    },
    "odd-ranks-with-packs": {
        PACKS: [
            asked("packed", CP3, recompute=None, schedule="greedy"),
            like("windows", CP3, "zigzag", "auto", steps=2),
            like("mixed", CP3, checkpoint="auto", steps=2),
            like("packed windows", CP3, "zigzag", "auto", steps=2),
            like("packed mixed", CP3, "boundary", "auto", steps=2),
        ],
        "latent attention, packed and not; every layout, CP 3": [
            like("latent", CP3, "boundary", "auto"),
            like("yarn", CP3, "zigzag", "auto"),
            like("packed yarn", CP3, checkpoint="auto"),
        ],
        TREES: [
            like("tree", CP3, checkpoint="auto"),
            like("tree", CP3, "boundary", recompute=FULL),
            like("tree", CP3, "zigzag", "auto"),
            like("tree yarn", CP3, "boundary", "auto"),
            asked("mask", CP3, None, 1, loss_tile=7),
            like("mask", CP3, "boundary", recompute=FULL),
            like("mask balanced", CP3, "zigzag", "auto"),
        ],
        CUT_ONE_BY_ONE: [padded("padded", CP3), padded("padded latent", CP3, "none")],
        AHEAD: [
            like("ahead", CP3, checkpoint="auto"),
            like("ahead", CP3, "boundary"),
            like("ahead per token", CP3, "zigzag", "auto"),
        ],
    },
    "four-ranks": {
        ALIKE: [like("plain", CP4, checkpoint="auto", steps=2)],
        "TP 2 x CP 2 with sequence parallelism, the same": [
            like("plain", TP2_CP2, checkpoint="auto", steps=3),
            like("plain", TP2_CP2, "boundary", steps=2),
            like("norms", TP2_CP2, "boundary", "auto", steps=2),
        ],
        "TP 2 without sequence parallelism": [like("plain", TP2_CP2, "boundary", "auto", config=WHOLE_NORMS)],
        DATA: [
            like("plain", CP2_DP2, checkpoint="auto", steps=2, overlap=True),
            like("plain", CP2_DP2, "boundary", "auto", steps=3, overlap=True, optimizer="distributed"),
            like("one group", TP2_CP2, "boundary", "auto", steps=2),
            like("experts", CP2_DP2_EP2, checkpoint="auto", steps=2),
        ],
        FULLY_SHARDED: [sharded(CP2_DP2, "boundary", FSDP2, "auto"), sharded(CP2_DP2, "boundary", FSDP, "auto")],
    },
    "four-ranks-with-packs": {
        "heads exchanged, CP 4 as 2 x 2": [
            asked("plain", CP4, None, 1, ulysses_degree=2),
            asked("plain", CP4, ulysses_degree=2, data_layout="boundary"),
            asked("plain", TP2_CP2, None, 1, ulysses_degree=2, data_layout="zigzag"),  # one kv head a rank
            asked("packed mixed", CP4, ulysses_degree=2),
        ],
        OFFSETS: [like("learnable", TP2_CP2, "boundary", "auto", optimizer="megatron")],
        ROUTERS: [like("balanced", TP2_CP2, "boundary", "auto"), like("balanced per token", TP2_CP2)],
        AHEAD: [like("ahead", TP2_CP2, checkpoint="auto", config=(*kinds.TWO_AHEAD, *WHOLE_NORMS))],
        PACKS_IN_WINDOWS: [like("packed mixed", TP2_CP2, "boundary", "auto", steps=2)],
        TREES: [
            like("tree", TP2_CP2, "boundary", "auto"),
            like("tree experts", CP2_DP2_EP2, "boundary", "auto", optimizer="distributed"),
            asked("mask", CP4, FULL, 1, ulysses_degree=2),
        ],
        CUT_ONE_BY_ONE: [padded("padded", TP2_CP2), padded("padded experts", CP2_DP2_EP2)],
    },
    "pipelines": {
        "PP 2 x CP 2, the same": [
            like("plain", PP2_CP2, steps=2),
            like("plain", PP2_CP2, "boundary", "auto", steps=3),
        ],
        "interleaved pipeline, PP 2 x VP 2 x CP 2": [
            like("plain", Topology(pp=2, vp=2, cp=2), "boundary", "auto", steps=2)
        ],
        "heterogeneous layers; PP 2 x CP 2 in layouts `contiguous` and `boundary`": [
            like("heterogeneous", PP2_CP2, checkpoint="auto"),
            like("heterogeneous", PP2_CP2, "boundary", "auto"),
        ],
        "latent attention, PP 2 x CP 2 and TP 2 x CP 2": [like("latent", PP2_CP2, "boundary", "auto")],
        AHEAD: [like("ahead per token", PP2_CP2)],
        PACKS_IN_WINDOWS: [like("packed mixed", PP2_CP2, checkpoint="auto", steps=2)],
        TREES: [
            like("tree", PP2_CP2, recompute=FULL),
            like("mask", Topology(pp=2, vp=2, cp=2), "boundary", "auto"),
        ],
        CUT_ONE_BY_ONE: [padded("padded", PP2_CP2)],
    },
    "one-rank": {
        PACKS: [like("packed mixed", ALONE, checkpoint="auto", steps=2), like("windows", ALONE, "zigzag")],
        TREES: [like("tree", ALONE, "zigzag"), like("mask", ALONE, checkpoint="auto")],
        ALIKE: [like("plain", ALONE, "boundary", steps=2)],
    },
}
"""By the row of docs/support.md; all of a group on the same ranks. DFA_HALF=0 or 1 takes every second one of a row."""


@pytest.mark.support("megatron", lambda params: list(GROUPS[params["group"]]))
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_train_like_one(group: str, references: Callable[..., dict[str, str]]) -> None:
    trainings = [each for row in GROUPS[group].values() for each in kinds.by_turns(row)]
    paths = references(*(name for _, _, name in trainings))
    # The padded packs first: nobody has declared yet how batches are cut; pipelines, whose ranks lack groups, last.
    trainings.sort(key=lambda training: (not training[1].padded, str(training[0])))
    cases = [(topology, wanted, kinds.expected(topology, wanted), paths[name]) for topology, wanted, name in trainings]
    run_ranks(trainings[0][0].ranks, harness.check_topologies, cases, timeout=300)


def test_dropout_elsewhere_is_the_same_with_remat() -> None:
    run_ranks(4, harness.check_same_dropout, TP2_CP2, timeout=120)


def per_token_loss(rank: int, ranks: int, reference: str) -> None:
    """In Megatron-Core 0.16 the sum over tokens is not even sent; 0.19 sends it to a wrapper that ignores it."""
    harness.start(CP2)
    run = harness.train(CP2, case("boundary", steps=1, config=(*LOCAL, *kinds.PER_TOKEN), wrapper=FSDP2))
    expected = torch.load(reference, weights_only=True)["gradients"]
    off = [(gradient.norm() / expected[name].norm()).item() for name, gradient in run.gradients.items()]
    assert min(off) > 10, "Megatron divides them now: the refusal in dfa_flags.py has no reason any more"


def test_pytorchs_fsdp_does_not_divide_by_tokens_which_is_why_that_loss_is_refused(reference: str) -> None:
    run_ranks(2, per_token_loss, reference)
