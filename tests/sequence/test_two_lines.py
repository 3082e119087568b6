"""What the pages say in two lines: several sinks of a head, a bias of keys, linear attention in both directions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import dfa_megatron
from tests.support import pages
from tests.support.close import assert_close
from tests.support.workers import over_ranks


def compare(block: pages.Block, want: torch.Tensor, leaves: dict[str, torch.Tensor], of_all: set[str]) -> None:
    """Run a block on the ranks' tokens; compare its out, and the gradients of every leaf.

    of_all: leaves without tokens, whose gradients are summed over the ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    wanted = dict(zip(leaves, torch.autograd.grad(want, [*leaves.values()], weight), strict=True))

    def mine(name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name in of_all else x.chunk(ranks, 1)[rank]

    here = {name: mine(name, x.detach()).clone().requires_grad_() for name, x in leaves.items()}
    names: dict[str, Any] = {**here, "torch": torch, "group": None}
    names["dist_flash_attn_func"] = dfa_megatron.dist_flash_attn_func
    names["config"] = dfa_megatron.DistAttentionConfig(kernel="reference")
    out = pages.run(block, names)["out"]
    assert_close(out, mine("", want), tolerance=1e-13, name="out")
    for name, got in zip(here, torch.autograd.grad(out, [*here.values()], mine("", weight)), strict=True):
        if name in of_all:
            dist.all_reduce(got)
        assert_close(got, mine(name, wanted[name]), tolerance=1e-12, name=f"gradient of {name}")


@over_ranks(3)
def test_the_two_lines_of_the_pages_are_exact_with_their_gradients(rank: int, ranks: int) -> None:
    seed = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed, dtype=torch.float64).requires_grad_()

    length = 4 * ranks
    leaves = {"q": leaf(2, length, 4, 8), "k": leaf(2, length, 2, 8), "v": leaf(2, length, 2, 8)}
    more = {"sinks": leaf(3, 4), "bias": leaf(2, length, 2, 1)}
    q, k, v = leaves.values()
    bias = more["bias"].repeat_interleave(2, 2).permute(0, 2, 3, 1)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * 8**-0.5 + bias
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    sinks = more["sinks"].T[None, :, None].expand(2, 4, length, 3)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :length]
    want = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    compare(("docs/masks.md", "logsumexp"), want, leaves | more, {"sinks"})
    leaves["k"], leaves["v"] = leaf(2, length, 4, 8), leaf(2, length, 4, 5)
    want = torch.einsum("bihk,bjhk,bjhv->bihv", *leaves.values())
    compare(("docs/hybrids.md", "torch.distributed.nn"), want, leaves, set())
