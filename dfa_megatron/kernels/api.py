"""The contract of a block kernel: attention of one call, and its gradient given the lse of the whole rows.

Shapes: q, out, dout, dq (batch, q_len, heads, head_dim); k, dk (batch, kv_len, kv_heads, head_dim); v, dv (batch,
kv_len, kv_heads, head_dim_v), and out has v's head_dim; lse, minus_delta (batch, heads, q_len). Tensors may be strided
views.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.launching import Cut, LaunchKind, Takes, launches
from dfa_megatron.kernels.segments import Part, Rows, Segments, Split
from dfa_megatron.plan.language.geometry import Band, Form
from dfa_megatron.plan.language.leaves import LeafSizes
from dfa_megatron.plan.lowering.kernel_calls import Launching

Partial = tuple[torch.Tensor, torch.Tensor]
"""(out, lse) of some rows."""

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(dq, dk, dv)."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of lse, delta and every accumulator: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True)
class Need:
    """The demands of one distributed attention; a kernel is chosen once for all ranks and steps.

    Raises:
        UnsupportedError: heads are no multiple of kv_heads.
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    forms: frozenset[Form]
    deterministic: bool = False
    capability: tuple[int, int] | None = None
    """CUDA compute capability, None on CPU."""
    softcap: float = 0.0
    """Scores are softcap * tanh(scores / softcap); 0 leaves them as they are."""
    packed: bool = False
    """Calls have several segments, whose lengths differ in every batch."""
    invariant: bool = False
    """A segment has the same bits alone and in any company."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            what = f"{self.heads} heads with {self.kv_heads} kv_heads"
            raise UnsupportedError(what, "heads must be a multiple of kv_heads", "for example equal counts")


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One kernel call: everything that forward and backward share.

    segments: which pairs are seen. softmax_scale: positive. softcap: 0 for none. deterministic:
    whether gradients must have equal bits in every run. into: dense memory for out, or for dq, dk and dv, which a
    kernel with `writes_into` fills and returns; None, or no memory at all, for its own.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    segments: Segments
    softmax_scale: float
    softcap: float = 0.0
    deterministic: bool = False
    into: tuple[torch.Tensor | None, ...] = ()

    @classmethod
    def of(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band, softmax_scale: float, **options: Any
    ) -> BlockCall:
        """Return a call of a single segment; options are the fields with a default."""
        return cls(q, k, v, Segments.one(band, q.shape[1], k.shape[1]), softmax_scale, **options)

    def part(self, part: Part, into: tuple[torch.Tensor | None, ...] = ()) -> BlockCall:
        """Return one launch of this call; into: memory for the launch's results."""
        k, v = part.columns.take(self.k), part.columns.take(self.v)
        q = part.rows.take(self.q)
        return BlockCall(q, k, v, part.segments, self.softmax_scale, self.softcap, self.deterministic, into)


@dataclass(frozen=True, slots=True)
class Saved:
    """The forward's results that a backward needs: the global lse, and one of delta and out.

    lse, minus_delta (batch, heads, q_len) in the accumulator dtype, minus_delta = -rowsum(dout * out): the
    summand of flash-attn-4; out (batch, q_len, heads, head_dim_v) in q's dtype. A kernel's `backward_needs` names the
    one that is there.
    """

    lse: torch.Tensor
    minus_delta: torch.Tensor | None = None
    out: torch.Tensor | None = None

    def rows(self, rows: Rows) -> Saved:
        """Return the same of some rows."""
        return Saved(
            lse=rows.take(self.lse, 2),
            minus_delta=None if self.minus_delta is None else rows.take(self.minus_delta, 2),
            out=None if self.out is None else rows.take(self.out),
        )


class BlockKernel(ABC):
    """One way to compute a call. Kernels have no state: everything that differs between calls is in the call.

    A kernel implements `refusal`, `launch` and `launch_backward`, and declares the calls that a launch takes;
    `forward` and `backward` divide any other call into such launches.
    """

    name: ClassVar[str]
    backward_needs: ClassVar[Literal["delta", "out"]]
    """The result of the forward that a backward reads beside lse; a helping rank is sent the same."""
    takes_out: ClassVar[bool] = False
    """The backward takes out in place of delta, too: one rank sends nothing, and leaves delta to the kernel."""
    cut: Cut | None = None
    """Divides the tile of a segment into tiles that a launch takes; None where it takes any band."""
    takes: LaunchKind = "segment"
    """Which segments one launch computes: see `Takes`."""
    skips_rows: ClassVar[bool] = False
    """A launch of several segments takes memory for its results, and leaves the rows between them as they are there."""
    writes_into: ClassVar[bool] = False
    """A launch writes its results into memory of the call."""
    caps_scores: ClassVar[bool] = False

    @abstractmethod
    def refusal(self, need: Need) -> str | None:
        """Return why this kernel cannot serve the need (with the versions found), or None if it can."""

    def replays(self, *, deterministic: bool) -> bool:
        """Return whether a tape sees all that it does: operations of PyTorch, and launches handed to the tape."""
        return False

    def leaves(self, need: Need) -> LeafSizes | None:
        """Return the sizes of chunks whose results have the same bits in any company, or None where none have."""
        return None

    @abstractmethod
    def launch(self, call: BlockCall) -> Partial:
        """Compute `forward` for a call as `takes` and `cut` declare it."""

    @abstractmethod
    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Compute `backward` for a call as `takes` and `cut` declare it."""

    def launch_into(self, call: BlockCall, into: Partial) -> Partial:
        """Compute `launch` of several segments with gaps between their rows into memory; for `skips_rows`."""
        raise NotImplementedError

    def launch_backward_into(self, call: BlockCall, dout: torch.Tensor, saved: Saved, dq: torch.Tensor) -> Gradients:
        """Compute `launch_backward` in the same way, dq into memory."""
        raise NotImplementedError

    def forward(self, call: BlockCall) -> Partial:
        """Return normalised (out, lse): out in q's dtype, lse (natural logarithm) in the accumulator dtype.

        A row that sees nothing has out 0 and lse -inf.
        """
        split = self._split(call)
        if (only := split.only) is not None:
            return self.launch(call.part(only, call.into))
        q, v = call.q, call.v
        (given,) = call.into or (None,)
        out = q.new_empty(*q.shape[:3], v.shape[3]) if given is None else given
        lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator_dtype(q.dtype))
        if not split.fills_rows:
            out.zero_()
            lse.fill_(-math.inf)
        for part in split.parts:
            if self.skips_rows and part.segments.window is not None:
                self.launch_into(call.part(part), (out, lse))
                continue
            part_out, part_lse = self.launch(call.part(part))
            part.rows.put(out, part_out)
            part.rows.put(lse, part_lse, 2)
        return out, lse

    def backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return the call's share of (dq, dk, dv), given the lse of the whole rows; 0 where nothing is seen.

        Source: section 3.1 of the paper; FlashAttention-2.
        """
        split = self._split(call)
        if (only := split.only) is not None and only.is_whole:
            return self.launch_backward(call.part(only, call.into), dout, saved)
        q, k, v = call.q, call.k, call.v
        # The gradients of copied keys wait for those of all launches; else keys in common are summed in memory.
        copies = split.copies
        adds = split.shares_columns and copies is None
        key_dtype = accumulator_dtype(q.dtype) if adds else k.dtype
        into, fills = call.into or (None, None, None), split.fills_columns or copies is not None
        dq = _memory(q, q.dtype, split.fills_rows, into[0])
        dk, dv = (_memory(x, key_dtype, fills, given) for x, given in ((k, into[1]), (v, into[2])))
        waiting: list[list[torch.Tensor]] = []
        for part in split.parts:
            rows, columns = part.rows, part.columns
            if self.skips_rows and part.segments.window is not None:
                _, *of_keys = self.launch_backward_into(call.part(part), dout, saved, dq)
            else:
                part_dq, *of_keys = self.launch_backward(call.part(part), rows.take(dout), saved.rows(rows))
                rows.put(dq, part_dq)
            waiting.append(of_keys)
            if copies is None:
                for whole, one in zip((dk, dv), waiting.pop(), strict=True):
                    columns.put(whole, one, add=adds)
        if copies is not None:
            from dfa_megatron.kernels.merge import sum_rows  # which imports this module

            for whole, parts in zip((dk, dv), zip(*waiting, strict=True), strict=True):
                sum_rows(parts[0] if len(parts) == 1 else torch.cat(parts, 1), copies, whole)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def launching(self, *, batch: int, group: int, bands: bool) -> Launching:
        """Return what decides the calls and launches of an attention.

        Args:
            batch: sequences at once.
            group: query heads that have the same keys.
            bands: this kernel takes windows that are neither full nor square causal.
        """
        return functools.partial(launches, self._takes(batch, group, bands=bands))

    def _takes(self, batch: int, group: int = 0, *, bands: bool = True) -> Takes:
        kind = self.takes if batch == 1 else "segment"
        return Takes(kind, self.cut, self.skips_rows, bands, group if kind == "window" else 0)

    def _split(self, call: BlockCall) -> Split:
        """Return the launches of a call: as prepared, or decided here for a call that was not, and cached on it."""
        segments, batch = call.segments, call.q.shape[0]
        if segments.split is not None:
            return segments.split
        key = type(self), batch == 1
        if key not in segments.tables:
            found = self._takes(batch).divide(segments.parts, segments.q_len, segments.kv_len)
            segments.tables[key] = Split.of(found, segments.q_len, segments.kv_len, ragged=segments.ragged)
        split: Split = segments.tables[key]
        return split


def _memory(x: torch.Tensor, dtype: torch.dtype, is_filled: bool, given: torch.Tensor | None) -> torch.Tensor:
    """Return memory for a gradient of x, zeroed unless every row will be written."""
    if given is not None and given.dtype == dtype:
        return given if is_filled else given.zero_()
    new = torch.empty_like if is_filled else torch.zeros_like
    return new(x, dtype=dtype, memory_format=torch.contiguous_format)
