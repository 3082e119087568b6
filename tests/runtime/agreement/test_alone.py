"""What one rank does alone between the agreement and the end of the backward: every rank is told, and none waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.recurrence import dist_conv, dist_scan
from dfa_megatron.runtime.comm.transports import Communicator
from dfa_megatron.sharding import unshard_sequence
from tests.support.arguments import arguments, told
from tests.support.attend import case
from tests.support.recurrences import convolve, recurrence
from tests.support.workers import run_ranks


def tensors(local: int, gradients: str = "qkv") -> list[torch.Tensor]:
    return [torch.randn(1, local, 4 // (1 + (name != "q")), 16, requires_grad=name in gradients) for name in "qkv"]


def attend(qkv: list[torch.Tensor], mode: Any = None, **options: object) -> None:
    """A forward, and a backward where something needs it."""
    with nullcontext() if mode is None else mode():
        out = dfa_megatron.dist_flash_attn_func(*qkv, **arguments(causal=True, **options))
    assert isinstance(out, torch.Tensor)
    if out.requires_grad:
        out.sum().backward()


def packed(qkv: list[torch.Tensor], ranks: int) -> None:
    q, k, v = (x[0] for x in qkv)
    length = len(q) * ranks
    out = dfa_megatron.dist_flash_attn_varlen_func(q, k, v, (0, length - 3, length), causal=True)
    if out.requires_grad:
        out.sum().backward()


def scan(odd: bool, ranks: int, rank: int) -> None:
    drawn = recurrence("gla", 4 * ranks, seed=1)
    mine = {name: x.detach().requires_grad_(not odd) for name, x in drawn.rows(rank, ranks).items()}
    out, _ = dist_scan(drawn.scan, mine)
    if out.requires_grad:
        out.sum().backward()


def conv(odd: bool) -> None:
    x = torch.randn(1, 6, 4, requires_grad=True)
    with torch.no_grad() if odd else nullcontext():
        out = dist_conv(convolve(torch.randn(4, 3)), x, 3)
    if out.requires_grad:
        out.sum().backward()


def _without_gradients(rank: int, ranks: int) -> dict[str, str]:
    odd = rank == ranks - 1
    sinks = torch.randn(4, requires_grad=not odd)
    found = {
        "no input": told(lambda: attend(tensors(4, "" if odd else "qkv"))),
        "no input, one elsewhere": told(lambda: attend(tensors(6, "" if odd else "v"))),
        "no_grad": told(lambda: attend(tensors(8), torch.no_grad if odd else None)),
        "inference_mode": told(lambda: attend(tensors(10), torch.inference_mode if odd else None)),
        "sinks": told(lambda: attend(tensors(12, ""), sinks=sinks)),
        "heads in stages": told(lambda: attend(tensors(14, "" if odd else "k"), head_stages=2)),
        "heads travel": told(lambda: attend(tensors(16, "" if odd else "q"), ulysses_degree=2)) if ranks == 2 else "",
        "a pack": told(lambda: packed(tensors(18, "" if odd else "q"), ranks)),
        "a recurrence": told(lambda: scan(odd, ranks, rank)),
        "a convolution": told(lambda: conv(odd)),
        "unshard": told(lambda: unshard_sequence(torch.randn(2, 4, requires_grad=not odd), dim=1)),
    }
    attend(tensors(4))  # the group goes on; then what all ranks know
    attend(tensors(4), torch.no_grad)
    return found | {"known": told(lambda: attend(tensors(4, "" if odd else "qkv")))}


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_whose_inputs_need_no_gradient_is_told_in_the_forward(ranks: int) -> None:
    reports = run_ranks(ranks, _without_gradients, timeout=60)
    for report in reports:
        for name, text in report.items():
            if name == "heads travel" and ranks != 2:
                continue
            assert text.startswith(("DisagreementError: ", "LostGroupError: ")), (name, text)
            assert "requires_grad" in text or "gradient: " in text or "gradient True" in text, (name, text)
            assert f"on rank {ranks - 1}" in text or name == "unshard", (name, text)


def _some_gradients(rank: int, ranks: int) -> None:
    """Each rank needs the gradients of other inputs: all of them are exact."""
    whole = case(5 * ranks)
    rows = whole.rows(rank, ranks)
    for shift in range(3):
        mine = (rank + shift) % 3
        shard = [x[:, rows].detach().requires_grad_(at == mine) for at, x in enumerate(whole.inputs)]
        out = dfa_megatron.dist_flash_attn_func(*shard, **arguments(causal=True))
        (got,) = torch.autograd.grad(out, shard[mine], whole.dout[:, rows])
        torch.testing.assert_close(got, whole.gradients[mine][:, rows], rtol=1e-10, atol=1e-10)


def test_ranks_may_need_gradients_of_other_inputs() -> None:
    run_ranks(3, _some_gradients, timeout=60)


def _opening_fails(rank: int, ranks: int) -> dict[str, tuple[str, float]]:
    """The last rank cannot open its first, or its second, connections of each group."""
    found = {}
    make = Communicator.__init__

    def opens(count: int) -> Callable[..., None]:
        left = [count]

        def fails(self: Communicator, *args: Any) -> None:
            left[0] -= 1
            if rank == ranks - 1 and left[0] < 0:
                raise RuntimeError("no socket is left in this test")
            make(self, *args)

        return fails

    actions: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "attention": lambda group: attend(tensors(4), group=group),
        "heads travel": lambda group: attend(tensors(6), group=group, ulysses_degree=2),
        "convolution": lambda group: dist_conv(convolve(torch.randn(4, 3)), torch.randn(1, 6, 4), 3, group=group),
    }
    for name, action in actions.items():
        for count in range(2 if name != "convolution" else 1):
            group = dist.new_group(list(range(ranks)))
            Communicator.__init__ = opens(count)  # type: ignore[method-assign]
            began = time.monotonic()
            text = told(partial(action, group))
            found[f"{name} {count}"] = text, time.monotonic() - began
            assert "was lost" in told(partial(action, group))
    Communicator.__init__ = make  # type: ignore[method-assign]
    dist.barrier()
    return found


def test_a_rank_that_cannot_open_its_connections_tells_the_others() -> None:
    *others, last = run_ranks(4, _opening_fails, timeout=90)
    for name, (text, _) in last.items():
        assert "no socket is left in this test" in text, name
    for report in others:
        for name, (text, seconds) in report.items():
            assert text.startswith("LostGroupError: rank 3 of the group failed in its call "), (name, text)
            assert "no socket is left in this test" in text
            assert seconds < 10, name
