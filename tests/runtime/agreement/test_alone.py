"""What one rank does alone between the agreement and the end of the backward: every rank is told, and none waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch._dynamo  # noqa: F401 -- a recompute loads it, which takes seconds, where a test waits for one
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import masks
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.indexed import index_topk
from dfa_megatron.recurrence import dist_conv, dist_mamba2, dist_scan
from dfa_megatron.runtime.comm.transports import Communicator
from dfa_megatron.sequence.max_logits import max_logits
from dfa_megatron.sequence.roll import roll_sequence
from dfa_megatron.sharding import unshard_sequence
from tests.recurrence.test_upstream import mamba2
from tests.support.arguments import arguments, tensors, told
from tests.support.attend import case
from tests.support.recurrences import convolve, recurrence
from tests.support.workers import over_ranks


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


@over_ranks(2, 3)
def test_a_rank_whose_inputs_need_no_gradient_is_told_in_the_forward(rank: int, ranks: int) -> None:
    odd = rank == ranks - 1
    sinks = torch.randn(4, requires_grad=not odd)
    found = {
        "no input": told(lambda: attend(tensors(4, "" if odd else "qkv"))),
        "no input, one elsewhere": told(lambda: attend(tensors(6, "" if odd else "v"))),
        "no_grad": told(lambda: attend(tensors(8), torch.no_grad if odd else None)),
        "inference_mode": told(lambda: attend(tensors(10), torch.inference_mode if odd else None)),
        "sinks": told(lambda: attend(tensors(12, ""), sinks=sinks)),
        "a pack": told(lambda: packed(tensors(18, "" if odd else "q"), ranks)),
        "a recurrence": told(lambda: scan(odd, ranks, rank)),
        "a convolution": told(lambda: conv(odd)),
        "unshard": told(lambda: unshard_sequence(torch.randn(2, 4, requires_grad=not odd), dim=1)),
    }
    if ranks == 2:
        found["heads travel"] = told(lambda: attend(tensors(16, "" if odd else "q"), ulysses_degree=2))
    attend(tensors(4))  # the group goes on; then what all ranks know
    attend(tensors(4), torch.no_grad)
    found["known"] = told(lambda: attend(tensors(4, "" if odd else "qkv")))
    for name, text in found.items():
        assert text.startswith(("DisagreementError: ", "LostGroupError: ")), (name, text)
        assert "requires_grad" in text or "gradient: " in text or "gradient True" in text, (name, text)
        assert f"on rank {ranks - 1}" in text or name == "unshard", (name, text)


@over_ranks(3, timeout=60)
def test_ranks_may_need_gradients_of_other_inputs(rank: int, ranks: int) -> None:
    """Each rank needs the gradients of other inputs: all of them are exact."""
    whole = case(5 * ranks)
    rows = whole.rows(rank, ranks)
    for shift in range(3):
        mine = (rank + shift) % 3
        shard = [x[:, rows].detach().requires_grad_(at == mine) for at, x in enumerate(whole.inputs)]
        out = dfa_megatron.dist_flash_attn_func(*shard, **arguments(causal=True))
        (got,) = torch.autograd.grad(out, shard[mine], whole.dout[:, rows])
        torch.testing.assert_close(got, whole.gradients[mine][:, rows], rtol=1e-10, atol=1e-10)


WORDS, QUARTER = "an accident of this test", 5.0
"""What an error says, and a quarter of the timeout, after which a rank that is not there is missed."""


def breaks(bad: bool, name: str) -> Any:
    """Have a function of ours, "module.name", fail on the rank that is meant."""
    return patch(f"dfa_megatron.{name}", fails(True, None, torch.OutOfMemoryError)) if bad else nullcontext()


def fails(bad: bool, real: Any, error: type[Exception] = RuntimeError) -> Any:
    def failing(*_: object, **__: object) -> None:
        raise error(WORDS)

    return failing if bad else real


def written(bad: bool, group: Any) -> None:
    """A backward whose saved tensors one rank has written over."""
    q, k, v = tensors(4)
    out = dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, group=group))
    if bad:
        with torch.no_grad():
            k.add_(1)
    out.sum().backward()


def decode(bad: bool, group: Any, broken: str = "", k: Any = None, **config: Any) -> None:
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    with breaks(bad and bool(broken), f"sequence.decode.{broken}"):
        dfa_megatron.decode_attn_func(q, cache if k is None or not bad else k, cache, group=group, **config)


def scans(bad: bool, group: Any, error: type[Exception] | None = RuntimeError) -> None:
    drawn = recurrence("gla", 8 * group.size(), seed=1)
    mine = drawn.rows(group.rank(), group.size())
    if bad and error is None:
        del mine["k"]
    given = drawn.scan if error is None else replace(drawn.scan, run=fails(bad, drawn.scan.run, error))
    dist_scan(given, mine, group=group)


def convolves(bad: bool, group: Any, width: int = 3, **config: Any) -> None:
    run = convolve(torch.randn(4, 3))
    x = torch.randn(1, 6, 4)
    dist_conv(fails(bad and width == 3, run), x, 3 if not bad else width, group=group, **config)


def config(bad: bool, odd: Any) -> dict[str, Any]:
    return {"config": odd} if bad else {}


def choose(bad: bool, group: Any) -> None:
    index = (torch.randn(1, 4, *shape) for shape in ((2, 3), (3,), (2,)))
    index_topk(*index, 2, group=group, **config(bad, None))


def mamba(bad: bool, group: Any) -> None:
    x, dt, b = torch.randn(1, 4, 2, 4), torch.rand(1, 4, 2), torch.randn(1, 4, 1, 4)
    options: Any = {"D": dt[0, 0], "dt_bias": dt[0, 0], "dt_limit": (0.0, 1.0)} | ({"nonsense": 1} if bad else {})
    dist_mamba2(mamba2, {"x": x, "dt": dt, "B": b, "C": b}, -torch.ones(2), group=group, **options)


def rolls(bad: bool, group: Any, broken: str = "", rows: Any = None) -> None:
    with breaks(bad and bool(broken), broken):
        roll_sequence(torch.randn(1, 4, 2), -1, group=group, cu_seqlens=rows if bad else None)


def largest(bad: bool, group: Any, broken: str = "", scale: Any = None) -> None:
    q, k, _ = tensors(4)
    with breaks(bad and bool(broken), broken):
        max_logits(q, k, causal=True, group=group, softmax_scale=scale if bad else None)


def given(bad: bool, group: Any, at: int, other: Any) -> None:
    qkv: list[Any] = tensors(4, "")
    if bad:
        qkv[at] = other
    dfa_megatron.dist_flash_attn_func(*qkv, **arguments(causal=True, group=group))


def packs(bad: bool, group: Any, other: Any) -> None:
    length = 4 * group.size()
    offsets = other if bad else (0, length - 1, length)
    dfa_megatron.dist_flash_attn_varlen_func(*(x[0] for x in tensors(4, "")), offsets, causal=True, group=group)


def masked(bad: bool, group: Any) -> None:
    rows = [masks.causal(4 * group.size() + bad)]
    dfa_megatron.dist_flash_attn_func(*tensors(4, ""), mask=rows, group=group)


ALONE: dict[str, tuple[Callable[[bool, Any], None], str]] = {
    "an array for q": (lambda bad, group: given(bad, group, 0, np.zeros((1, 4, 4, 16))), "q of type ndarray"),
    "a list for k": (lambda bad, group: given(bad, group, 1, [1.0]), "list"),
    "a saved tensor": (written, "modified by an inplace operation"),
    "offsets": (lambda bad, group: packs(bad, group, "0, 4"), "cu_seqlens"),
    "offsets without a length": (lambda bad, group: packs(bad, group, 4), "int"),
    "masks of rows": (masked, "its layout has"),
    "decoding": (lambda bad, group: decode(bad, group, "_call"), WORDS),
    "decoding's merge": (lambda bad, group: decode(bad, group, "_merged"), WORDS),
    "decoding over a list": (lambda bad, group: decode(bad, group, k=[1.0]), "list"),
    "a scan": (scans, WORDS),
    "a scan out of memory": (lambda bad, group: scans(bad, group, torch.OutOfMemoryError), WORDS),
    "a scan that refuses": (lambda bad, group: scans(bad, group, UnsupportedError), WORDS),
    "a scan without keys": (lambda bad, group: scans(bad, group, None), "there is no 'k' among them"),
    "a convolution": (convolves, WORDS),
    "a convolution of no width": (lambda bad, group: convolves(bad, group, 0), "a convolution of width 0"),
    "an option of Mamba": (mamba, "option 'nonsense'"),
    "a roll": (lambda bad, group: rolls(bad, group, "runtime.execute.moves._bytes"), WORDS),
    "a roll of rows": (lambda bad, group: rolls(bad, group, rows=[(0, 8), (0, 8)]), "rows in a batch of"),
    "largest logits": (lambda bad, group: largest(bad, group, "sequence.max_logits._raise"), WORDS),
    "the scale of logits": (lambda bad, group: largest(bad, group, scale="small"), "scale"),
    "no config of a choice": (choose, "config=None"),
    "no config of a decoding": (lambda bad, group: decode(bad, group, **config(bad, {})), "config={}"),
    "no config of a convolution": (lambda bad, group: convolves(bad, group, **config(bad, "on")), "config='on'"),
}
"""What one rank does alone, (whether this rank does, group), and words of its error."""


@pytest.mark.parametrize(("ranks", "odd", "part"), [(2, 1, 0), (3, 0, 1), (3, 2, 2)])
@over_ranks(timeout=120)
def test_an_error_of_one_rank_alone_is_told_to_the_others_at_once(rank: int, ranks: int, odd: int, part: int) -> None:
    """The ranks know every second call already."""
    for at, name in enumerate([*ALONE][part % 2 :: 2][:: 1 if part < 2 else -1]):
        group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=QUARTER * 4))
        action, words = ALONE[name]
        if at % 2:
            action(False, group)
        began, text = time.monotonic(), ""
        try:
            action(rank == odd, group)
            attend(tensors(4), group=group)  # which hears of what came behind the other's exchange
        except Exception as error:  # noqa: BLE001 -- of any kind
            text = f"{type(error).__name__}: {error}"
        assert time.monotonic() - began < QUARTER, (name, text)
        assert words in text, (name, text)
        if rank != odd:
            assert text.startswith(("DisagreementError: ", "LostGroupError: ")), (name, text)
            assert f"rank {odd} of the group" in text or f"on rank {odd}" in text, (name, text)


@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (3, 0)])
@over_ranks(timeout=90)
def test_a_rank_that_alone_compares_nothing_is_named_on_every_rank(rank: int, ranks: int, odd: int) -> None:
    """One rank has verify="off", from its first call of a group on, or after calls that compare."""
    drawn = recurrence("gla", 4 * ranks, seed=1)
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
    actions: dict[str, Callable[..., object]] = {
        "attention": lambda **where: dfa_megatron.dist_flash_attn_func(*tensors(4), causal=True, **where),
        "a scan": lambda **where: dist_scan(drawn.scan, drawn.rows(rank, ranks), **where),
        "decoding": lambda **where: dfa_megatron.decode_attn_func(q, cache, cache, **where),
    }
    configs = [DistAttentionConfig(verify=verify) for verify in ("on", "off")]
    for name, action in actions.items():
        for before in (0, 1, 2):
            group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=4 * QUARTER))
            for config in configs[:before]:
                action(group=group, config=config)
            began = time.monotonic()
            text = told(partial(action, group=group, config=configs[rank == odd])) if before < 2 else ""
            assert time.monotonic() - began < QUARTER, (name, before, text)
            if before == 0:
                assert text.startswith("DisagreementError: "), (name, text)
                assert "request.verify: " in text and f"off on rank {odd}" in text, (name, text)  # noqa: PT018
            elif (name, before) == ("attention", 1):
                assert text.startswith(("DisagreementError: ", "LostGroupError: ")), (name, text)
                assert f"prepares an attention that it has not run before on rank {odd}" in text, (name, text)
            else:
                assert text == "", "small exchanges are compared once the ranks compare"


@over_ranks(2, timeout=60)
def test_a_recompute_that_stops_early_is_no_error(rank: int, ranks: int) -> None:
    """What is last in a checkpointed region is left by an exception as soon as its tensors are saved again."""
    offsets = (0, 4 * ranks)
    regions: list[tuple[Callable[..., Any], list[torch.Tensor]]] = [
        (lambda *qkv: dfa_megatron.dist_flash_attn_func(*qkv, causal=True), tensors(4)),
        (lambda *qkv: dfa_megatron.dist_flash_attn_varlen_func(*(x[0] for x in qkv), offsets, causal=True), tensors(4)),
        (lambda x: dist_conv(convolve(torch.ones(4, 3)), x.sin(), 3), [torch.randn(1, 6, 4, requires_grad=True)]),
        (lambda x: roll_sequence(x.sin(), -1), [torch.randn(1, 4, 2, requires_grad=True)]),
    ]
    for region, leaves in regions:
        for _ in range(2):
            expected = torch.autograd.grad(region(*leaves).sum(), leaves)
            found = checkpoint(region, *leaves, use_reentrant=False)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), leaves), expected)


@over_ranks(4, timeout=90)
def test_a_rank_that_cannot_open_its_connections_tells_the_others(rank: int, ranks: int) -> None:
    """The last rank cannot open its connections of each group."""
    make = Communicator.__init__

    def fails(self: Communicator, *args: Any) -> None:
        if rank == ranks - 1:
            raise RuntimeError("no socket is left in this test")
        make(self, *args)

    actions: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "attention": lambda group: attend(tensors(4), group=group),
        "heads travel": lambda group: attend(tensors(6), group=group, ulysses_degree=2),
        "convolution": lambda group: dist_conv(convolve(torch.randn(4, 3)), torch.randn(1, 6, 4), 3, group=group),
    }
    for name, action in actions.items():
        group, began = dist.new_group(list(range(ranks))), time.monotonic()
        with patch.object(Communicator, "__init__", fails):
            text = told(partial(action, group))
            assert "no socket is left in this test" in text, name
            assert "set GLOO_SOCKET_IFNAME" in text, name
            if rank < ranks - 1:
                assert text.startswith("LostGroupError: rank 3 of the group failed in its call "), (name, text)
                assert time.monotonic() - began < 10, name
            assert "was lost" in told(partial(action, group))
