"""Training with distributed attention equals Megatron-Core's own attention on one rank, whatever the topology."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.ssm import gated_delta_net

from tests.frameworks import compare
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import (
    BLOCK,
    FULL,
    LOCAL,
    MEGATRONS,
    PER_TOKEN,
    SPREAD,
    TRAINS,
    TRAINS_IN_PACKS,
    WHOLE_NORMS,
    like,
)  # fmt: skip
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.fuzz.frameworks.steps import check
from tests.megatron import hybrids
from tests.support.workers import by_turns, over_ranks

CP2, CP3, CP4, TP2 = {"cp": 2}, {"cp": 3}, {"cp": 4}, {"tp": 2}
TP2_CP2, PP2_CP2, CP2_DP2 = {"tp": 2, "cp": 2}, {"pp": 2, "cp": 2}, {"cp": 2, "dp": 2}
EP2, CP2_DP2_EP2, PP2_VP2_CP2 = {"cp": 2, "ep": 2}, {"cp": 2, "dp": 2, "ep": 2}, {"pp": 2, "vp": 2, "cp": 2}


def selective(name: str, layout: str, *modules: str) -> MegatronDraw:
    """--recompute-granularity selective --recompute-modules ...: Megatron's own, attention runs once without us."""
    return like(
        name, CP2, layout, config={"recompute_granularity": "selective", "recompute_modules": list(modules)}, **TRAINS
    )


def sharded(sizes: dict[str, int], layout: str, wrapper: str, checkpoint: str = "none", **config: Any) -> MegatronDraw:
    """Fully sharded parameters."""
    more = {**MEGATRONS, "optimizer": "torch"} if wrapper == FSDP2 else {**SPREAD, "overlap": True}
    return like("plain", sizes, layout, checkpoint, config=LOCAL | config, wrapper=wrapper, **more)


FSDP2, FSDP, FSDP_OF_GRADIENTS = "torch_fsdp2", "megatron_fsdp:optim_grads_params", "megatron_fsdp:optim_grads"
ALIKE = "CP 2, 3, 4; layouts `contiguous`, `boundary`; recomputation ours and none"
ROUTERS = "losses, z-loss and bias of routers, with padding_mask and uneven loss masks; CP 3"
AHEAD = "multi-token prediction; every layout, CP 3, TP 2 x CP 2, PP 2 x CP 2"
PACKS = "windows; packed documents; both; CP 1, 2, 3"
PACKS_IN_WINDOWS = "packs in windows, TP 2 x CP 2 and PP 2 x CP 2"
CUT_ONE_BY_ONE = "documents padded to 2 x CP and cut zigzag one by one: CP 2, 3, 4, TP, PP, EP"
UNEVEN = "packed rows that the ranks do not divide"
TREES = "prompt trees, any mask; CP 3, TP, PP, EP"
IMAGES = "multimodal rotary embeddings, packed and not; every layout, CP 3"
OFFSETS = "learned and fixed softmax offsets; every layout, TP 2 x CP 2"
FULLY_SHARDED = "PyTorch's and Megatron's fully sharded parameters (FSDP)"
TILES = "loss by tiles; TP 2 with and without sequence parallelism, CP 3, PP 2, MTP"
STATES = "hybrids (Mamba, gated delta nets), whole, packed and padded: CP 3, TP 2 x CP 2"
TILE = {"loss_tile": 7}

GROUPS: dict[str, dict[str, list[MegatronDraw]]] = {
    "recomputation": {
        "recomputation full, block, uniform; Megatron's own or ours": [
            like("plain", CP2, "boundary", config=FULL),  # Megatron's own: every attention runs twice
            like("plain", CP2, checkpoint="auto", config=BLOCK | {"num_layers": 4, "recompute_num_layers": 3}),
            like("plain", CP2, checkpoint="auto", config=FULL | {"recompute_num_layers": 2}),  # taken as 1
            like("plain", CP2, checkpoint="remat"),
            like("plain", CP2, "boundary", "remat", config=BLOCK),
        ],
        "CP 2: distributed optimizer, experts (EP 2), selective recomputation, offload": [
            like("plain", CP2, checkpoint="auto", config=FULL, overlap=True, **TRAINS),
            like("plain", CP2, checkpoint="auto", config=FULL, overlap=True, **SPREAD | {"warm": 2}),
            like("plain", CP2, checkpoint="auto", config=FULL, options={"remat_offload": True}, **TRAINS),
            selective("plain", "contiguous", "mlp"),
            selective("experts", "boundary", "moe"),
            like("experts", EP2, "boundary", "auto", config=FULL, **TRAINS),
        ],
        "experts in every other layer": [like("alltoall", CP2, "boundary", "auto", config=FULL)],
    },
    "layers": {
        OFFSETS: [
            like("learnable", CP2, "boundary", "auto", config=FULL),
            like("off by one", CP2, "zigzag", "auto", config=FULL),
            like("packed learnable", CP2, checkpoint="auto", config=FULL),
        ],
        FULLY_SHARDED: [
            sharded(CP2, "boundary", FSDP2, **FULL),  # Megatron's own runs layers again from outside
            sharded(CP2, "contiguous", FSDP, "auto", **FULL),
            sharded(CP2, "boundary", FSDP_OF_GRADIENTS),
        ],
        "TP 2 without sequence parallelism": [
            like("plain", TP2, checkpoint="auto", config=FULL | WHOLE_NORMS | {"distribute_saved_activations": True}),
        ],
        TILES: [
            like("plain", TP2, options=TILE),
            like("plain", TP2, options=TILE, config=WHOLE_NORMS),
            like("plain", {"pp": 2}, options=TILE),
        ],
        ROUTERS: [like("balanced", TP2, checkpoint="auto", config=FULL)],
        CUT_ONE_BY_ONE: [like("padded", CP2, "boundary")],
    },
    "odd-ranks": {
        ALIKE: [
            like("plain", CP3, checkpoint="auto", config=FULL, **TRAINS),
            like("plain", CP3),
            like("plain", CP3, "boundary", **TRAINS),
        ],
        "layout `zigzag`, CP 3": [
            like("plain", CP3, "zigzag", **TRAINS), like("plain", CP3, "zigzag", "auto", config=FULL),
        ],
        ROUTERS: [
            like("balanced", CP3, checkpoint="auto", config=FULL),
            like("balanced", CP3, "boundary", **TRAINS),
            like("balanced", CP3, "zigzag"),
            like("balanced per token", CP3, **TRAINS),
            like("balanced per token", CP3, "boundary", "auto", config=FULL),
            like("biased", CP3),
        ],
        TILES: [like("plain", CP3, config=FULL, options=TILE)],
    },
    "states": {
        STATES: [
            *(like(name, CP3, "boundary", "remat") for name in ("padded stack", "tree delta", "stack by steps")),
            *(like(name, CP3, "boundary") for name in ("padded delta", "stack")),
            *(like(name, CP3, "contiguous", "remat") for name in ("packed stack", "delta")),
            like("stack ahead", CP3, "boundary", "remat", config=PER_TOKEN),
        ],
        "hybrid (Mamba) stacks; layout `zigzag`, CP 3": [  # in Megatron's own order
            like("stack of six groups", CP3, "zigzag", "remat"),
        ],
    },
    "overlaps": {
        "overlap of experts' messages; EP 2, 3, PP 2 x VP 2 x CP 2": [
            like("overlapped", EP2, "boundary"),
            like("packed overlapped", EP2, "contiguous", options=TILE),
            like("packed overlapped", {"cp": 3, "ep": 3}, "boundary", config={"num_moe_experts": 6}),
            like("overlapped", {**PP2_VP2_CP2, "ep": 2}, "boundary"),
        ],
    },
    "replays": {
        "replayed and recorded routing (RouterReplay): CP 2, 3, TP 2 x CP 2": [
            like("replayed", CP3, "boundary", "remat"),
            like("replayed", CP2, "boundary", config=FULL),  # Megatron's own recomputation replays again
            like("packed replayed", CP3, "boundary"),
            like("recorded", CP2, "boundary", "remat"),
            like("recorded", CP3, "contiguous"),
            like("replayed", TP2_CP2, "boundary", "auto", config=FULL),
            like("recorded", TP2_CP2, "boundary", masks=("holes",)),
        ],
    },
    "kimis": {
        "Kimi delta attention, in Megatron's development branch: CP 2, 3": [
            like("kimi", CP3, "boundary", "remat"), like("padded kimi stack", CP2, "boundary", "remat"),
            like("packed kimi", CP2, "contiguous"), like("packed kimi", CP3, "boundary", "auto", config=FULL),
        ],
    },
    "odd-ranks-with-packs-and-trees": {
        PACKS: [
            like("packed", CP3, options={"schedule": "greedy"}),
            like("windows", CP3, "zigzag", "auto", config=FULL),
            like("mixed", CP3, checkpoint="auto", config=FULL),
            like("packed windows", CP3, "zigzag", "auto", config=FULL, **TRAINS_IN_PACKS),
            like("packed mixed", CP3, "boundary", "auto", config=FULL, **TRAINS_IN_PACKS),
        ],
        "latent attention, packed and not; every layout, CP 3": [
            like("latent", CP3, "boundary", "auto", config=FULL),
            like("yarn", CP3, "zigzag", "auto", config=FULL),
            like("packed yarn", CP3, checkpoint="auto", config=FULL),
        ],
        UNEVEN: [
            like("packed mixed", CP3, "boundary", "remat", batch=1, tokens=50),
            like("tree latent", CP3, batch=1, tokens=49),
            like("packed", CP3, "zigzag", batch=1, tokens=46),
            like("packed experts", CP3, "boundary", batch=1, tokens=7),
            like("packed delta", CP3, "contiguous", "remat", batch=1, tokens=47),
        ],
        CUT_ONE_BY_ONE: [
            like("padded", CP3, "boundary", "auto", config=FULL), like("padded latent", CP3, "boundary"),
        ],
        TREES: [
            like("tree", CP3, checkpoint="auto", config=FULL),
            like("tree", CP3, "boundary", config=FULL),
            like("tree", CP3, "zigzag", "auto", config=FULL),
            like("tree yarn", CP3, "boundary", "auto", config=FULL),
            like("mask", CP3, checkpoint="auto", options=TILE),
            like("mask", CP3, "boundary", config=FULL),
            like("mask balanced", CP3, "zigzag", "auto", config=FULL),
            *(like(name, CP3, "boundary") for name in ("tree learned", "mask stack", "tree stack")),
        ],
        IMAGES: [
            *(like("images", CP3, layout) for layout in ("zigzag", "boundary")),
            *(like("rows of images", CP3, layout) for layout in ("zigzag", "contiguous")),
            *(like("mask of images", CP3, layout) for layout in ("boundary", "contiguous")),
            like("padded of images", CP3, "boundary"),
        ],
    },
    "predictions": {
        AHEAD: [
            like("ahead", CP3, checkpoint="auto", config=FULL),
            like("ahead", CP3, "boundary"),
            like("ahead per token", CP3, "zigzag", "auto", config=FULL),
        ],
        "multi-token prediction of packs; layouts `contiguous`, `boundary`, CP 3": [
            like("packed ahead per token", CP3),
            *(like(name, CP3, "boundary") for name in ("packed ahead", "packed ahead per token", "padded ahead")),
            like("padded ahead", CP3, "boundary", config={"calculate_per_token_loss": False}),
        ],
    },
    "four-ranks": {
        ALIKE: [like("plain", CP4, checkpoint="auto", config=FULL)],
        "TP 2 x CP 2 with sequence parallelism, the same": [
            like("plain", TP2_CP2, checkpoint="auto", config=FULL, **TRAINS),
            like("plain", TP2_CP2, "boundary"),
            like("norms", TP2_CP2, "boundary", "auto", config=FULL, **TRAINS),
        ],
        "TP 2 without sequence parallelism": [
            like("plain", TP2_CP2, "boundary", "auto", config=FULL | WHOLE_NORMS),
        ],
        "CP 2 x DP 2, EP 2; fewer key/value groups than TP": [
            like("plain", CP2_DP2, checkpoint="auto", config=FULL, overlap=True, **TRAINS),
            like("plain", CP2_DP2, "boundary", "auto", config=FULL, overlap=True, **SPREAD | {"warm": 2}),
            like("one group", TP2_CP2, "boundary", "auto", config=FULL, **TRAINS),
            like("experts", CP2_DP2_EP2, checkpoint="auto", config=FULL, **TRAINS),
        ],
        FULLY_SHARDED: [
            sharded(CP2_DP2, "boundary", FSDP2, "auto", **FULL), sharded(CP2_DP2, "boundary", FSDP, "auto", **FULL),
        ],
        TILES: [like("ahead", TP2_CP2, options=TILE)],
        "heads exchanged, CP 4 as 2 x 2": [
            like("plain", CP4, options={"ulysses_degree": 2}),
            like("plain", CP4, "boundary", "auto", config=FULL, options={"ulysses_degree": 2}, **TRAINS),
            like("plain", TP2_CP2, "zigzag", options={"ulysses_degree": 2}),  # one kv head a rank
            like("packed mixed", CP4, checkpoint="auto", config=FULL, options={"ulysses_degree": 2}, **TRAINS_IN_PACKS),
        ],
        OFFSETS: [like("learnable", TP2_CP2, "boundary", "auto", config=FULL, **MEGATRONS)],
        ROUTERS: [
            like("balanced", TP2_CP2, "boundary", "auto", config=FULL), like("balanced per token", TP2_CP2),
        ],
        AHEAD: [like("ahead", TP2_CP2, checkpoint="auto", config=FULL)],
        PACKS_IN_WINDOWS: [like("packed mixed", TP2_CP2, "boundary", "auto", config=FULL, **TRAINS_IN_PACKS)],
        TREES: [
            like("tree", TP2_CP2, "boundary", "auto", config=FULL),
            like("tree experts", CP2_DP2_EP2, "boundary", "auto", config=FULL, **SPREAD),
            like("mask", CP4, config=FULL, checkpoint="auto", options={"ulysses_degree": 2}),
        ],
        CUT_ONE_BY_ONE: [
            like("padded", TP2_CP2, "boundary", "auto", config=FULL),
            like("padded experts", CP2_DP2_EP2, "boundary", "auto", config=FULL),
        ],
    },
    "pipelines": {
        "PP 2 x CP 2, the same": [
            like("plain", PP2_CP2), like("plain", PP2_CP2, "boundary", "auto", config=FULL, **TRAINS),
        ],
        "interleaved pipeline, PP 2 x VP 2 x CP 2": [
            like("plain", PP2_VP2_CP2, "boundary", "auto", config=FULL, **TRAINS)
        ],
        "heterogeneous layers; PP 2 x CP 2 in layouts `contiguous` and `boundary`": [
            *(like("heterogeneous", PP2_CP2, layout, "auto", config=FULL) for layout in ("contiguous", "boundary")),
        ],
        "latent attention, PP 2 x CP 2 and TP 2 x CP 2": [
            like("latent", PP2_CP2, "boundary", "auto", config=FULL)
        ],
        AHEAD: [like("ahead per token", PP2_CP2)],
        PACKS_IN_WINDOWS: [like("packed mixed", PP2_CP2, checkpoint="auto", config=FULL, **TRAINS_IN_PACKS)],
        TREES: [
            like("tree", PP2_CP2, config=FULL), like("mask", PP2_VP2_CP2, "boundary", "auto", config=FULL),
        ],
        CUT_ONE_BY_ONE: [like("padded", PP2_CP2, "boundary", "auto", config=FULL)],
        "GPTs with gated delta nets; PP 2 x CP 2, EP 2, distributed optimizer": [
            like("delta", {"pp": 2, "cp": 2, "ep": 2}, checkpoint="auto", config=FULL | {"num_layers": 4}, **SPREAD),
        ],
    },
    "one-rank": {
        PACKS: [
            like("packed mixed", checkpoint="auto", config=FULL, **TRAINS_IN_PACKS), like("windows", layout="zigzag"),
        ],
        TREES: [like("tree", layout="zigzag"), like("mask", checkpoint="auto", config=FULL)],
        ALIKE: [like("plain", layout="boundary", **TRAINS)],
    },
}  # fmt: skip
"""By the row of docs/support.md; all of a group on the same ranks. DFA_HALF=0 or 1 takes every second one of a row."""


if not hasattr(gated_delta_net, hybrids.KIMIS):
    del GROUPS["kimis"]


@pytest.mark.support("megatron", lambda params: list(GROUPS[params["group"]]))
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_train_like_one(group: str) -> None:
    compare.check(harness.step, [draw for row in GROUPS[group].values() for draw in by_turns(row)])


def test_random_steps_are_those_of_one_rank() -> None:
    """`make fuzz-frameworks` draws more."""
    check("megatron", 8)


@over_ranks(4, timeout=120)
def test_dropout_elsewhere_is_the_same_with_remat(rank: int, ranks: int) -> None:
    ways = (("none", {}), ("auto", FULL), ("none", FULL))
    rows = [like("plain", TP2_CP2, checkpoint=mode, config={"hidden_dropout": 0.1, **more}) for mode, more in ways]
    plain, rematerialized, megatrons = map(harness.step, rows)
    assert plain.tokens == rematerialized.tokens == megatrons.tokens
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, rematerialized.gradients[name]), name
    undropped = harness.step(like("plain", TP2_CP2))
    assert all(undropped.tokens[at] != loss for at, loss in plain.tokens.items())


@over_ranks(2)
def test_pytorchs_fsdp_does_not_divide_by_tokens_which_is_why_that_loss_is_refused(rank: int, ranks: int) -> None:
    """In Megatron-Core 0.16 the sum over tokens is not even sent; 0.19 sends it to a wrapper that ignores it."""
    row = sharded(CP2, "boundary", FSDP2, **PER_TOKEN)
    expected = harness.step(dataclasses.replace(row.alone(), warm=0)).gradients
    found = harness.step(dataclasses.replace(row, warm=0)).gradients
    off = [(gradient.norm() / expected[name].norm()).item() for name, gradient in found.items()]
    assert min(off) > 10, "Megatron divides them now: the refusal in dfa_flags.py has no reason any more"
