"""One attention, over ranks or with all ranks in this process, compared with dense float64 attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.doctor.dense import band_mask, band_of, dense_attention, pairs_of
from dfa_megatron.plan.interpret import rank_loop
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.program import Program
from dfa_megatron.plan.schedules import layout_of
from dfa_megatron.runtime.execute.sinks import merge_sinks, sinks_gradient
from dfa_megatron.runtime.prepare import Prepared, build
from dfa_megatron.runtime.request import Inputs, Request
from dfa_megatron.runtime.run import algebra
from dfa_megatron.sharding import layout_of_tokens, positions_of
from tests.support.arguments import arguments

Shards = Sequence[torch.Tensor]
States = Callable[[], AbstractContextManager[Any]]

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative norm of the error of a whole output that rounding explains; a gradient has four times as much."""
ON_GPU = {**TOLERANCE, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


class Results(NamedTuple):
    """out (batch, tokens, heads, width), lse (batch, heads, tokens), and the gradients of q, k, v and sinks."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A whole attention: what is asked, its tensors, and what dense float64 attention of the rounded inputs is.

    Tensors are (batch, tokens, heads, head_dim), those of a pack too: its batch is 1.
    """

    tokens: int = 0
    offsets: tuple[int, ...] = ()
    """Of a pack's documents; the last is its tokens."""
    keys: int = 0
    """Of another sequence than the queries; 0 for one sequence."""
    apart: tuple[Mask | tuple[int, ...], ...] = ()
    """Rows of a batch that differ: the case is of them joined, and the public functions get the rows."""
    layout: str | Layout = "contiguous"
    """Of these rows."""
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.float64
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    mask: Mask | None = None
    """In place of the two."""
    softmax_scale: float | None = None
    softcap: float = 0.0
    with_sinks: bool = False
    first_in_memory: str = ""
    """A rank's q, k, v and dout are contiguous, or have "tokens" or "heads" first in memory."""
    seed: int = 0
    device: str = "cpu"

    @property
    def length(self) -> int:
        return self.offsets[-1] if self.offsets else self.tokens

    @property
    def columns(self) -> int:
        """The number of keys."""
        return self.keys or self.length

    @property
    def options(self) -> dict[str, Any]:
        """What the public function is asked, without tensors."""
        asked = {"causal": self.causal, "window_size": self.window_size} if self.mask is None else {"mask": self.mask}
        return asked | {"softmax_scale": self.softmax_scale, "softcap": self.softcap}

    @cached_property
    def _drawn(self) -> tuple[torch.Tensor, ...]:
        """q, k, v and dout; sinks from negligible to overwhelming."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        batch, wide = 1 if self.offsets else self.batch, self.head_dim_v or self.head_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float64)

        sizes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, wide), (self.heads, wide)
        lengths = self.length, self.columns, self.columns, self.length
        four = [random(batch, n, *size).to(self.dtype) for n, size in zip(lengths, sizes, strict=True)]
        return (*four, 3 * random(self.heads))

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k and v."""
        return self._drawn[:3]

    @property
    def dout(self) -> torch.Tensor:
        return self._drawn[3]

    @property
    def sinks(self) -> torch.Tensor | None:
        """(heads,), float64."""
        return self._drawn[4] if self.with_sinks else None

    @cached_property
    def exact(self) -> Results:
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in self.inputs]
        leaves += [self.sinks.clone().requires_grad_()] if self.sinks is not None else []
        more: dict[str, Any] = {"softmax_scale": self.softmax_scale, "softcap": self.softcap}
        more |= {"sinks": leaves[3] if self.with_sinks else None}
        out, lse = dense_attention(leaves[0], leaves[1], leaves[2], self._visible, **more)
        dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, self.dout.double())
        return Results(out.detach(), lse.detach(), dq, dk, dv, *dsinks)

    @property
    def _visible(self) -> Any:
        if self.mask is not None:
            tokens, keys = (n // len(self.apart or "1") for n in (self.length, self.columns))
            rows = [pairs_of(row, tokens, keys) for row in self.apart if isinstance(row, Mask)]
            return torch.block_diag(*rows).bool() if rows else self.mask
        if self.keys:
            return band_mask(self.length, self.keys, band_of(self.causal, self.window_size))
        document = torch.bucketize(torch.arange(self.length), torch.tensor(self.offsets[1:-1]), right=True)
        band = band_mask(self.length, self.length, band_of(self.causal, self.window_size))
        return band & (document[:, None] == document)

    @property
    def out(self) -> torch.Tensor:
        return self.exact.out

    @property
    def gradients(self) -> tuple[torch.Tensor, ...]:
        """dq, dk and dv."""
        return self.exact[2:5]

    def rows(self, rank: int, ranks: int, layout: str | Layout = "contiguous", side: str = "q") -> torch.Tensor:
        """The places of a rank's queries, or of its keys."""
        if isinstance(layout, str):
            length = self.length if side == "q" else self.columns
            if layout == "load_balanced" and self.mask is not None:
                return positions_of(layout_of(layout, self.mask, ranks), rank, self.device)
            return positions_of(layout_of_tokens(layout, length, ranks, self.offsets or None), rank, self.device)
        return positions_of(layout.side(side), rank, self.device)

    def held(self, rank: int, ranks: int, layout: str | Layout = "contiguous") -> list[torch.Tensor]:
        """A rank's q, k, v and dout."""
        order = {"tokens": (1, 0, 2, 3), "heads": (0, 2, 1, 3)}.get(self.first_in_memory, (0, 1, 2, 3))
        q, kv = self.rows(rank, ranks, layout), self.rows(rank, ranks, layout, "kv")
        parts = zip((*self.inputs, self.dout), (q, kv, kv, q), strict=True)
        # Both orders are their own inverse.
        return [x[:, rows].permute(order).contiguous().permute(order) for x, rows in parts]

    def shard(
        self, rank: int, ranks: int, layout: str | Layout = "contiguous"
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k and v of a rank as leaves, and its dout; a pack's as the public function takes them."""
        *qkv, dout = (x[0] if self.offsets else x for x in self.held(rank, ranks, layout))
        return [x.detach().requires_grad_() for x in qkv], dout


def case(tokens: int, **options: Any) -> Case:
    """An attention over so many tokens."""
    return Case(tokens=tokens, **options)


def pack(offsets: tuple[int, ...], **options: Any) -> Case:
    """A pack of documents."""
    return Case(offsets=offsets, **{"softmax_scale": 0.3, **options})


def attend(case: Case, *qkv: torch.Tensor, **options: Any) -> Any:
    """The public function on a rank's tokens; what is not asked for otherwise is what the case says."""
    asked = {"softmax_scale": case.softmax_scale} if "plan" in options else case.options
    asked = asked | {"sinks": case.sinks} | options
    if case.apart:
        return _attend_rows(case, qkv, asked | {"layout": case.layout, "return_lse": True})
    if case.offsets:
        return dfa_megatron.dist_flash_attn_varlen_func(*qkv, case.offsets, **arguments(**asked))
    return dfa_megatron.dist_flash_attn_func(*qkv, **arguments(**asked))


def _attend_rows(case: Case, qkv: Shards, asked: dict[str, Any]) -> Any:
    rows, packs = list(case.apart), bool(case.offsets)
    qkv = [(x if packs else x[0]).unflatten(0, (len(rows), x.shape[not packs] // len(rows))) for x in qkv]
    if packs:
        out, lse = dfa_megatron.dist_flash_attn_varlen_func(*qkv, rows, **arguments(**asked))
    else:
        out, lse = dfa_megatron.dist_flash_attn_func(*qkv, **arguments(**asked | {"mask": rows}))
    out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return (out, lse) if packs else (out[None], lse[None])


def results(
    case: Case, rank: int = 0, ranks: int = 1, *, way: Callable[..., Any] | None = None,
    states: tuple[States, States] = (nullcontext, nullcontext), **options: Any,
) -> Results:  # fmt: skip
    """A forward and backward of this rank's tokens by the public function; collective.

    Args:
        way: a checkpoint, or what else calls a function of q, k, v and sinks that it is given before these.
        states: of PyTorch, around the forward and the backward.
    """
    leaves, dout = case.shard(rank, ranks, options.get("layout", "contiguous"))
    leaves += [] if case.sinks is None else [case.sinks.clone().requires_grad_()]

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> Any:
        return attend(case, q, k, v, **{"sinks": sinks, "return_lse": True} | options)

    with states[0]():
        out, lse = way(region, *leaves) if way else region(*leaves)
    with states[1]():
        out.backward(dout)  # re-entrant checkpoints take no other
    gradients: list[Any] = [x.grad for x in leaves]
    assert way or not lse.requires_grad
    assert [x.dtype for x in (out, *gradients)] == [case.dtype, *(x.dtype for x in leaves)]
    if case.sinks is not None and ranks > 1:
        dist.all_reduce(gradients[3], group=options.get("group"))
    found = [out.detach(), lse.detach(), *gradients[:3]]
    return Results(*([x[None] for x in found] if case.offsets else found), *gradients[3:])


def results_together(
    case: Case, ranks: int, *, layout: str | Layout = "contiguous", deterministic: bool = False, **options: Any
) -> Results:
    """Run all ranks in this process: the same plan, kernels and wire format, no network. Tokens are in order.

    Where results merge in a fixed order, rows are where the plan has them.
    """
    scale = case.softmax_scale or case.head_dim**-0.5
    asked = case.options | {"softmax_scale": scale, "layout": layout, "cu_seqlens": case.offsets} | options
    request = Request(**arguments(**asked), sinks=case.with_sinks, deterministic=deterministic)
    q, k, v, dout = zip(*(case.held(rank, ranks, layout) for rank in range(ranks)), strict=True)
    prepared = prepare_together(request, q, k, v)
    if request.invariant:
        layout = prepared[0].plan.forward.layout
        assert ranks == 1 or layout == prepared[-1].plan.forward.layout
        q, k, v, dout = zip(*(case.held(rank, ranks, layout) for rank in range(ranks)), strict=True)
    assert len({(p.kernel.name, p.digest) for p in prepared}) == 1, "ranks chose other kernels or plans"
    found, sinks = forward_together(prepared, q, k, v), case.sinks
    outs, lses = zip(*(one if sinks is None else merge_sinks(*one, sinks) for one in found), strict=True)
    gradients = [backward_together(prepared, dout, q, k, v, outs, lses) for _ in range(1 + deterministic)]
    assert_same_bits(*([x for three in run for x in three] for run in gradients))
    assert {x.dtype for x in (*outs, *(x for three in gradients[0] for x in three))} == {case.dtype}
    order, columns = (
        torch.cat([case.rows(rank, ranks, layout, side) for rank in range(ranks)]).argsort() for side in ("q", "kv")
    )
    dq, dk, dv = (
        torch.cat(parts, 1)[:, its]
        for parts, its in zip(zip(*gradients[0], strict=True), (order, columns, columns), strict=True)
    )
    every = zip(dout, outs, lses, strict=True)
    dsinks = None if sinks is None else torch.stack([sinks_gradient(*one, sinks) for one in every]).sum(0)
    return Results(torch.cat(outs, 1)[:, order], torch.cat(lses, 2)[:, :, order], dq, dk, dv, dsinks)


def shares(
    case: Case, got: Results, rows: tuple[torch.Tensor, torch.Tensor] | None = None, tolerance: float | None = None, *,
    drawn: bool = False,
) -> dict[str, float]:  # fmt: skip
    """How far each result is from the exact one, as a share of what is tolerated; inf for NaN.

    Args:
        rows: the queries and the keys that `got` has; None for all.
        tolerance: of all results, in place of TOLERANCE.
        drawn: the case was drawn at random, so that its gradients may be as good as 0.
    """
    limit = (TOLERANCE if case.device == "cpu" else ON_GPU)[case.dtype]
    # A single key has probability 1 whatever the score: dq and dk of documents of one token are rounding alone.
    floor = 0.25 * case.dout.double().norm().item() if drawn or case.offsets or case.mask else 0.0
    found = {}
    for name, mine, want in zip(Results._fields, got, case.exact, strict=True):
        if want is None or mine is None:
            assert mine is want
            continue
        if rows is not None and name != "dsinks":
            want = want[:, :, rows[0]] if name == "lse" else want[:, rows[name in ("dk", "dv")]]
        subnormal = torch.finfo(case.dtype).tiny * want.numel() ** 0.5  # below, float16 has fewer digits
        least, factor = (floor, 4) if name.startswith("d") else (1.0 if name == "lse" else subnormal, 1)
        found[name] = _distance(mine, want, least) / (tolerance or factor * limit)
    return found


def _distance(got: torch.Tensor, want: torch.Tensor, least: float) -> float:
    """|got - want| over |want| or `least`; infinities must be in the same places."""
    a, b = got.detach().double(), want.double()
    if a.shape != b.shape or bool(((a != b) & (a.isinf() | b.isinf())).any()) or bool(a.isnan().any()):
        return float("inf")
    error = float(torch.where(b.isfinite(), a - b, 0.0).norm())
    size = max(least, float(torch.where(b.isfinite(), b, 0.0).norm()))
    return error / size if size else error


def assert_exact(found: dict[str, float]) -> None:
    """Assert that no share of `shares` is above 1."""
    off = ", ".join(f"{name} {share:.3g}" for name, share in found.items() if not share <= 1)
    assert not off, f"wrong, in units of the tolerance: {off}"


def compare(case: Case, rank: int = 0, ranks: int = 1, *, tolerance: float | None = None, **options: Any) -> None:
    """A forward and backward of this rank's tokens against its rows of the whole; collective."""
    layout = options.get("layout", "contiguous")
    rows = case.rows(rank, ranks, layout), case.rows(rank, ranks, layout, "kv")
    assert_exact(shares(case, results(case, rank, ranks, **options), rows, tolerance))


def together(case: Case, ranks: int, *, tolerance: float | None = None, **options: Any) -> None:
    """Compare with all ranks in this process."""
    assert_exact(shares(case, results_together(case, ranks, **options), tolerance=tolerance))


def assert_same_bits(*runs: Sequence[torch.Tensor | None]) -> None:
    """Assert that tensors are equal from run to run; None is left out."""
    for run in runs[1:]:
        for one, other in zip(runs[0], run, strict=True):
            assert one is other or (one is not None and other is not None and torch.equal(one, other))


def prepare_together(request: Request, q: Shards, k: Shards, v: Shards) -> list[Prepared]:
    """Prepare every rank; shard r holds the tokens of rank r."""
    return [build(request, len(q), rank, Inputs(q[rank], k[rank], v[rank])) for rank in range(len(q))]


def run_together(programs: Sequence[Program], algebras: Sequence[Any]) -> None:
    """Run all ranks in lockstep in this process, handing each payload over."""
    loops = [rank_loop(program, algebra) for program, algebra in zip(programs, algebras, strict=True)]
    for steps in zip(*loops, strict=True):
        if steps[0][0] == "post":
            wire = {
                (rank, message.peer): [x.clone() for x in algebras[rank].outgoing(message)]
                for rank, (_, _, step) in enumerate(steps)
                for message in step.sends
            }
            continue
        for rank, (_, _, step) in enumerate(steps):
            for message in step.receives:
                for into, value in zip(algebras[rank].incoming(message), wire.pop((message.peer, rank)), strict=True):
                    into.copy_(value)
        assert not wire, "messages that nobody receives"


@torch.no_grad()
def _bytes(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def forward_together(
    prepared: Sequence[Prepared], q: Shards, k: Shards, v: Shards
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (out, lse) of every rank."""
    algebras = [
        algebra(p, p.forward, (q[rank], k[rank], v[rank]), _bytes(p.forward.arena_bytes, q[0].device))
        for rank, p in enumerate(prepared)
    ]
    run_together([p.forward.program for p in prepared], algebras)
    return [(out, lse) for out, lse in (each.result("out") for each in algebras)]


@torch.no_grad()
def backward_together(
    prepared: Sequence[Prepared], dout: Shards, q: Shards, k: Shards, v: Shards, out: Shards, lse: Shards,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Return (dq, dk, dv) of every rank."""
    algebras = []
    for rank, p in enumerate(prepared):
        given = (dout[rank], q[rank], k[rank], v[rank], out[rank], lse[rank])
        algebras.append(algebra(p, p.backward, given, _bytes(p.backward.arena_bytes, q[0].device)))
    run_together([p.backward.program for p in prepared], algebras)
    return [(*each.result("dq"), *each.result("dkv")) for each in algebras]  # type: ignore[misc]
