"""Every mask of `dfa_megatron.masks`, forward and backward, against dense attention in float64."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from dfa_megatron import kernels, masks, tree_positions
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.plan.language.ir import AttentionPlan
from dfa_megatron.plan.lowering import kernel_calls
from dfa_megatron.plan.lowering.kernel_calls import Takes
from dfa_megatron.runtime.prepare import in_use
from dfa_megatron.runtime.request import Request
from tests.kernels.test_kernel_segments import Windows
from tests.support.attend import backward_together, case, compare, forward_together, prepare_together, together
from tests.support.close import assert_close
from tests.support.plan_cases import WAYS, ancestors, every_mask, heterogeneous_masks, plan_of, some_parents

KINDS, MANY = 25, (13, 15, 16, 18, 20, 21, 24)
"""How many kinds of masks there are, and those of which a call may use keys again."""


def mask_of(kind: int, tokens: int, rng: random.Random) -> masks.Mask:
    every = [*every_mask(tokens, rng), *heterogeneous_masks(tokens, rng)]
    assert len(every) == KINDS
    return every[kind].mask


@pytest.mark.parametrize("kind", range(KINDS))
def test_every_mask_serves_schedules_that_look_both_ways(kind: int) -> None:
    rng = random.Random(kind)
    for ranks, schedule, kernel in (
        (3, "ring", "reference"),
        (3, "greedy", "cpu"),
        (rng.randint(4, 9), "auto", "auto"),
    ):
        mask = mask_of(kind, ranks * rng.randint(1, 12), rng)
        together(
            case(mask.length, mask=mask, batch=rng.randint(1, 2), head_dim=4), ranks, schedule=schedule, kernel=kernel
        )


@pytest.mark.parametrize("skips", [False, True], ids=["gathers rows", "skips rows"])
def test_masks_are_dense_attention_where_launches_use_keys_again(skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = joined = 0
    monkeypatch.setattr(kernels, "KERNELS", {**kernels.KERNELS, "reference": Windows()})
    monkeypatch.setattr(Windows, "takes", Takes("window", skips=skips))
    monkeypatch.setattr(kernel_calls, "ROW", 1 << 40)
    monkeypatch.setattr(kernel_calls, "MOST_COPIES", 99)
    kernel_calls.launches.cache_clear()
    rng = random.Random(5)
    for kind in (*2 * MANY, *range(KINDS, KINDS + 6)):
        ranks, softcap, sinks = rng.randint(1, 4), rng.choice([0.0, 5.0]), rng.random() < 0.5
        if kind < KINDS:
            mask = mask_of(kind, ranks * rng.randint(6, 12), rng)
        else:
            lengths = [ranks * rng.randint(1, 4) for _ in range(12)]
            mask = masks.prompt_tree(lengths, some_parents(12, rng))
        some = case(mask.length, mask=mask, batch=1, head_dim=4, softcap=softcap, with_sinks=sinks)
        together(some, ranks, schedule=rng.choice(["greedy", "ring"]), kernel="reference")
        for _ in range(3):  # recorded, and replayed
            compare(some, schedule="greedy", kernel="reference")
        calls = [call for step in in_use()[-1].forward.program.steps for call in step.calls]
        pairs = [two for call in calls for two in pairwise(call.segments)]
        joined += sum(a.q_lo == b.q_lo for a, b in pairs)
        used += sum(a.q_lo < b.q_lo and b.kv_lo < a.kv_hi for a, b in pairs)
    kernel_calls.launches.cache_clear()
    assert used > 8
    assert joined > 8


Tensors = list[torch.Tensor]


def paths(lengths: list[int], parents: list[int]) -> list[list[int]]:
    """The tokens of each path from a root to a leaf: its prompt is repeated for every leaf."""
    ends = list(accumulate(lengths, initial=0))
    own = [list(range(lo, hi)) for lo, hi in pairwise(ends)]
    leaves = [segment for segment in range(len(lengths)) if segment not in parents]
    return [[token for above in reversed(ancestors(leaf, parents)) for token in own[above]] for leaf in leaves]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_tree_is_its_paths_with_every_prompt_repeated(ranks: int) -> None:
    """Outputs of all copies are equal, and the gradient of a shared token is the sum over its copies."""
    rng = random.Random(ranks)
    torch.manual_seed(ranks)
    for number in range(2):
        lengths = [rng.randint(1, 5) for _ in range(rng.randint(8, 14))]
        lengths[-1] += -sum(lengths) % (2 * ranks)
        parents = some_parents(len(lengths), rng) if number else [-1, *[0] * (len(lengths) - 1)]
        given = [torch.randn(1, sum(lengths), heads, 4, dtype=torch.float64) for heads in (6, 2, 2, 6)]
        leaves, dout = [x.requires_grad_() for x in given[:3]], given[3]
        each = paths(lengths, parents)
        rows = torch.tensor([token for path in each for token in path])
        repeated, _ = dense_attention(*(x[:, rows] for x in leaves), visible=masks.documents([len(p) for p in each]))
        copies = torch.bincount(rows)[rows, None, None]
        gradients = torch.autograd.grad(repeated, leaves, dout[:, rows] / copies)
        positions = tree_positions(lengths, parents)
        assert torch.equal(positions[rows], torch.tensor([place for path in each for place in range(len(path))]))
        for way in WAYS:
            plan = plan_of(way, masks.prompt_tree(lengths, parents), ranks)
            out, *got = whole(plan, given)
            for mine, want in zip((out[:, rows], *got), (repeated, *gradients), strict=True):
                assert_close(mine, want, tolerance=1e-13, name=f"{parents} on {ranks} ranks, {way}")


def whole(plan: AttentionPlan, given: Tensors) -> Tensors:
    """Out, dq, dk and dv of all tokens; all ranks in this process, each with the tokens of the plan's layout."""
    held = [plan.forward.layout.positions(rank) for rank in range(plan.ranks)]
    q, k, v, dout = ([x[:, rows].detach() for rows in held] for x in given)
    prepared = prepare_together(Request(softmax_scale=0.5, plan=plan, layout=plan.layout), q, k, v)
    out, lse = zip(*forward_together(prepared, q, k, v), strict=True)
    gradients = backward_together(prepared, dout, q, k, v, out, lse)
    order = torch.tensor([token for rows in held for token in rows]).argsort()
    return [torch.cat(parts, 1)[:, order] for parts in (out, *zip(*gradients, strict=True))]
