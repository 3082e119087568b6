"""One attention, over ranks or with all ranks in this process, compared with dense float64 attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.doctor.dense import band_mask, band_of, dense_attention
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.runtime.request import Request
from dfa_megatron.sharding import layout_of_tokens, positions_of
from tests.support.arguments import arguments
from tests.support.close import assert_close
from tests.support.together import both_together, prepare_together

Tensors = tuple[torch.Tensor, ...]

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative norm of the error of a whole output that rounding explains; a gradient has four to eight times as much."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A whole attention: what is asked, its tensors, and what dense float64 attention of the rounded inputs is.

    Tensors are (batch, tokens, heads, head_dim), those of a pack too: its batch is 1.
    """

    tokens: int = 0
    offsets: tuple[int, ...] = ()
    """Of a pack's documents; the last is its tokens."""
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
    with_slopes: bool = False
    seed: int = 0
    device: str = "cpu"

    @property
    def length(self) -> int:
        return self.offsets[-1] if self.offsets else self.tokens

    @property
    def options(self) -> dict[str, Any]:
        """What the public function is asked, without tensors."""
        asked = {"causal": self.causal, "window_size": self.window_size} if self.mask is None else {"mask": self.mask}
        return asked | {"softmax_scale": self.softmax_scale, "softcap": self.softcap}

    @cached_property
    def _drawn(self) -> Tensors:
        """q, k, v and dout; sinks from negligible to overwhelming; slopes from hardly felt to a few tokens' reach."""
        generator = torch.Generator(self.device).manual_seed(self.seed)
        batch, wide = 1 if self.offsets else self.batch, self.head_dim_v or self.head_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=torch.float64)

        sizes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, wide), (self.heads, wide)
        four = [random(batch, self.length, *size).to(self.dtype) for size in sizes]
        return (*four, 3 * random(self.heads), 2.0 ** (-2 + random(self.heads).clamp(-2, 2).float()))

    @property
    def inputs(self) -> Tensors:
        """q, k and v."""
        return self._drawn[:3]

    @property
    def dout(self) -> torch.Tensor:
        return self._drawn[3]

    @property
    def sinks(self) -> torch.Tensor | None:
        """(heads,), float64."""
        return self._drawn[4] if self.with_sinks else None

    @property
    def slopes(self) -> torch.Tensor | None:
        """(heads,), float32."""
        return self._drawn[5] if self.with_slopes else None

    @cached_property
    def _exact(self) -> Tensors:
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in self.inputs]
        leaves += [self.sinks.clone().requires_grad_()] if self.sinks is not None else []
        out, lse = dense_attention(
            *leaves[:3], self._visible, softmax_scale=self.softmax_scale, softcap=self.softcap, bias=self._bias,
            sinks=leaves[3] if self.with_sinks else None,
        )  # fmt: skip
        return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, self.dout.double()))

    @property
    def _visible(self) -> Any:
        if self.mask is not None:
            return self.mask
        document = torch.bucketize(torch.arange(self.length), torch.tensor(self.offsets[1:-1]), right=True)
        band = band_mask(self.length, self.length, band_of(self.causal, self.window_size))
        return band & (document[:, None] == document)

    @property
    def _bias(self) -> torch.Tensor | None:
        where = torch.arange(self.length, dtype=torch.float64, device=self.device)
        distance = (where[:, None] - where).abs()
        return None if self.slopes is None else -self.slopes.double()[:, None, None] * distance

    @property
    def out(self) -> torch.Tensor:
        return self._exact[0]

    @property
    def lse(self) -> torch.Tensor:
        """(batch, heads, tokens)."""
        return self._exact[1]

    @property
    def gradients(self) -> Tensors:
        """dq, dk, dv, and dsinks if it has sinks."""
        return self._exact[2:]

    def rows(self, rank: int, ranks: int, layout: str = "contiguous") -> torch.Tensor:
        """The places of a rank's tokens."""
        return positions_of(layout_of_tokens(layout, self.length, ranks, self.offsets or None), rank, self.device)

    def shard(self, rank: int, ranks: int, layout: str = "contiguous") -> tuple[list[torch.Tensor], torch.Tensor]:
        """q, k and v of a rank as leaves, and its dout; a pack's as the public function takes them."""
        rows = self.rows(rank, ranks, layout)
        q, k, v, dout = (x[0, rows] if self.offsets else x[:, rows] for x in (*self.inputs, self.dout))
        return [x.requires_grad_() for x in (q, k, v)], dout


def case(tokens: int, **options: Any) -> Case:
    """An attention over so many tokens."""
    return Case(tokens=tokens, **options)


def pack(offsets: tuple[int, ...], **options: Any) -> Case:
    """A pack of documents."""
    return Case(offsets=offsets, **{"softmax_scale": 0.3, **options})


def attend(case: Case, *qkv: torch.Tensor, **options: Any) -> Any:
    """The public function on a rank's tokens; what is not asked for otherwise is what the case says."""
    asked = {"softmax_scale": case.softmax_scale} if "plan" in options else case.options
    asked = asked | {"sinks": case.sinks, "alibi_slopes": case.slopes} | options
    if case.offsets:
        return dfa_megatron.dist_flash_attn_varlen_func(*qkv, case.offsets, **arguments(**asked))
    return dfa_megatron.dist_flash_attn_func(*qkv, **arguments(**asked))


def compare(
    case: Case, rank: int = 0, ranks: int = 1, *, tolerance: float | None = None, strided: bool = False, **options: Any
) -> None:
    """A forward and backward of this rank's tokens against its rows of the whole; collective.

    Args:
        tolerance: of all results, in place of TOLERANCE.
        strided: heads lie before tokens in the memory of q, k and v.
    """
    layout, group = str(options.get("layout", "contiguous")), options.get("group")
    qkv, dout = case.shard(rank, ranks, layout)
    if strided:
        qkv = [x.detach().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_() for x in qkv]
    leaves = qkv
    if case.sinks is not None:
        options["sinks"] = case.sinks.clone().requires_grad_()
        leaves = [*qkv, options["sinks"]]
    out, lse = attend(case, *qkv, **options, return_lse=True)
    gradients = list(torch.autograd.grad(out, leaves, dout))
    assert not lse.requires_grad
    if case.sinks is not None:
        assert gradients[3].dtype == case.sinks.dtype
        if ranks > 1:
            dist.all_reduce(gradients[3], group=group)
    rows, first = case.rows(rank, ranks, layout), tolerance or TOLERANCE[case.dtype]
    if case.offsets:
        out, lse, gradients[:3] = out[None], lse[None], [x[None] for x in gradients[:3]]
    assert_close(out, case.out[:, rows], tolerance=first, name="out")
    assert_close(lse, case.lse[:, :, rows], tolerance=first, name="lse")
    wanted = [*(x[:, rows] for x in case.gradients[:3]), *case.gradients[3:]]
    _compare_gradients(case, gradients, wanted, tolerance or 8 * first)


def together(case: Case, ranks: int, *, layout: str = "contiguous", **options: Any) -> None:
    """Compare with all ranks in this process; a Request's own softmax_scale and ALiBi are those of the case."""
    scale = case.softmax_scale or case.head_dim**-0.5
    asked = case.options | {"softmax_scale": scale, "layout": layout, "cu_seqlens": case.offsets} | options
    request = Request(**arguments(**asked), alibi=case.with_slopes)
    where = [case.rows(rank, ranks, layout) for rank in range(ranks)]
    q, k, v, dout = ([x[:, rows] for rows in where] for x in (*case.inputs, case.dout))
    prepared = prepare_together(request, q, k, v)
    outs, lses, gradients = both_together(prepared, q, k, v, dout, case.slopes)
    assert {out.dtype for out in outs} == {case.dtype}
    for rank, rows in enumerate(where):
        assert_close(outs[rank], case.out[:, rows], tolerance=TOLERANCE[case.dtype], name=f"out of rank {rank}")
        assert_close(lses[rank], case.lse[:, :, rows], tolerance=TOLERANCE[case.dtype], name=f"lse of rank {rank}")
    order = torch.cat(where).argsort()
    got = [torch.cat(parts, 1)[:, order] for parts in zip(*gradients, strict=True)]
    _compare_gradients(case, got, case.gradients, 4 * TOLERANCE[case.dtype])


def _compare_gradients(case: Case, got: Any, wanted: Any, limit: float) -> None:
    floor = limit * case.dout.double().norm().item() if case.offsets and case.dtype.itemsize == 2 else 0.0
    for name, mine, want in zip(("dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        # A single key has probability 1 whatever the score: dq and dk of documents of one token are rounding alone.
        if want.norm() >= floor:
            assert_close(mine, want, tolerance=limit, name=name)
        else:
            assert mine.double().norm() < 2 * floor, name
