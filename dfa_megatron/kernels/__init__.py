"""Block kernels: their contract, the registry, and the choice of one for a need.

A kernel computes attention of one call, and its gradient given the lse of the whole rows. Shapes: q, out, dout, dq
(batch, q_len, heads, head_dim); k, dk (batch, kv_len, kv_heads, head_dim); v, dv (batch, kv_len, kv_heads, head_dim_v),
and out has v's head_dim; lse, minus_delta (batch, heads, q_len). Tensors may be strided views.
"""

from __future__ import annotations

import importlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from dfa_megatron import names
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.segments import Part, Rows, Segments, Split
from dfa_megatron.names import nearest, say_once
from dfa_megatron.plan.language.geometry import Band, Form, Tile
from dfa_megatron.plan.language.leaves import LeafSizes
from dfa_megatron.plan.lowering.kernel_calls import Takes as Takes

logger = logging.getLogger(__name__)

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
    whether gradients must have equal bits in every run. into: dense memory for out, or out and lse, or for dq, dk and
    dv, which a kernel with `writes_into` fills and returns; None, or no memory at all, for its own. Rows between
    segments stay as they are there.
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


def uncut(tile: Tile) -> tuple[Tile, ...]:
    """Do not divide: for kernels that take any band in which every row sees a key, as in the shrunk tile given here."""
    return (tile,)


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
    takes: Takes = Takes("segment")
    """What one launch computes. If it skips rows, a launch of several segments writes into memory of the call."""
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
        """Compute `forward` for a call as `takes` declares it."""

    @abstractmethod
    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Compute `backward` for a call as `takes` declares it."""

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
            if self.takes.skips and part.segments.window is not None:
                self.launch(call.part(part, (out, lse)))
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
            if self.takes.skips and part.segments.window is not None:
                _, *of_keys = self.launch_backward(call.part(part, (dq, None, None)), dout, saved)
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

    def takes_of(self, batch: int, group: int = 0, *, bands: bool = True) -> Takes:
        """Return what one launch computes of that many sequences at once.

        group: query heads that have the same keys. bands: it takes windows that are neither full nor square causal.
        """
        kind = self.takes.kind if batch == 1 else "segment"
        return self.takes._replace(kind=kind, bands=bands, repeats=group if kind == "window" else 0)

    def _split(self, call: BlockCall) -> Split:
        """Return the launches of a call: as prepared, or decided here for a call that was not, and cached on it."""
        segments, batch = call.segments, call.q.shape[0]
        if segments.split is not None:
            return segments.split
        key = type(self), batch == 1
        if key not in segments.tables:
            found = self.takes_of(batch).divide(segments.parts, segments.q_len, segments.kv_len)
            segments.tables[key] = Split.of(found, segments.q_len, segments.kv_len, ragged=segments.ragged)
        split: Split = segments.tables[key]
        return split


def _memory(x: torch.Tensor, dtype: torch.dtype, is_filled: bool, given: torch.Tensor | None) -> torch.Tensor:
    """Return memory for a gradient of x, zeroed unless every row will be written."""
    if given is not None and given.dtype == dtype:
        return given if is_filled else given.zero_()
    new = torch.empty_like if is_filled else torch.zeros_like
    return new(x, dtype=dtype, memory_format=torch.contiguous_format)


_HOMES = {
    "flash4": ("adapters.flash4", "Flash4Kernel"),
    "cudnn": ("adapters.cudnn", "CudnnKernel"),
    "aten": ("adapters.aten", "AtenFlashKernel"),
    "cpu": ("adapters.cpu", "CpuKernel"),
    "triton": ("triton.adapter", "TritonKernel"),
    "reference": ("adapters.reference", "ReferenceKernel"),
}

assert ("auto", *_HOMES) == names.KERNELS, "the kernels are not those of dfa_megatron.names"


class _Kernels(Mapping[str, BlockKernel]):
    """Kernels by name, each loaded when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, BlockKernel] = {}

    def __getitem__(self, name: str) -> BlockKernel:
        if name not in self._loaded:
            module, kind = _HOMES[name]
            self._loaded[name] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


KERNELS: Mapping[str, BlockKernel] = _Kernels()
"""Every kernel by name, the preferred one first."""

OF_GPUS = frozenset({"flash4", "cudnn", "aten"})
"""Kernels that "auto" does not ask elsewhere."""

COMPILES_EACH_LENGTH = frozenset({"cudnn"})
"""Kernels that "auto" passes over where documents are packed: they compile a graph for each new length."""


def get(name: str) -> BlockKernel:
    """Return the kernel of that name, or refuse it with the nearest one."""
    if name in KERNELS:
        return KERNELS[name]
    raise UnsupportedError(f"kernel={name!r}", "there is no such kernel", nearest(name, names.KERNELS))


def select(name: str, need: Need) -> BlockKernel:
    """Return the kernel of that name, or for "auto" the first one that does not refuse the need; logged once.

    Else raise the reasons of those that were asked, and which kernels would do.
    """
    refused: dict[str, str] = {}
    for candidate in KERNELS if name == "auto" else (get(name).name,):
        why = _passed_over(candidate, need) if name == "auto" else None
        why = why or refusal(KERNELS[candidate], need)
        if why is None:
            reasons = "".join(f"; {kernel} refused: {why}" for kernel, why in refused.items())
            log = logger.warning if name == "auto" and candidate == "reference" else logger.info
            say_once(log, "kernel %s for %s%s", candidate, _describe(need), reasons)
            return KERNELS[candidate]
        refused[candidate] = why
    if name == "auto":
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refused.items())
        raise UnsupportedError(f"attention for {_describe(need)}", reasons, "another dtype, device or head_dim")
    would_do = [other for other, kernel in KERNELS.items() if refusal(kernel, need) is None]
    instead = "kernel=" + " or ".join(map(repr, would_do)) if would_do else "no kernel as it stands"
    raise UnsupportedError(f"kernel={name!r} for {_describe(need)}", refused[name], instead)


def _passed_over(name: str, need: Need) -> str | None:
    """Return why "auto" does not ask a kernel for the need, or None."""
    if name in OF_GPUS and torch.device(need.device).type != "cuda":
        return f"it runs on CUDA, not on {need.device}"
    if need.packed and name in COMPILES_EACH_LENGTH:
        return f"it compiles every new document length, so for packs it is taken by name only (kernel={name!r})"
    return None


def refusal(kernel: BlockKernel, need: Need) -> str | None:
    """Return why a kernel cannot serve the need, or None; a softcap is checked here for all kernels."""
    if not 0 <= need.softcap < math.inf:
        return f"a softcap is positive and finite, or 0 for none, not {need.softcap}"
    if need.softcap and not kernel.caps_scores:
        return "it caps no scores"
    if need.invariant and kernel.leaves(need) is None:
        return "the bits of its results depend on the shapes and the company of a call"
    return kernel.refusal(need)


def _describe(need: Need) -> str:
    head_dim = f"head_dim {need.head_dim}" + (f" and {need.head_dim_v}" if need.head_dim_v != need.head_dim else "")
    forms = "+".join(form for form in ("full", "causal", "band") if form in need.forms)
    capability = "" if need.capability is None else " {}.{}".format(*need.capability)
    heads = f"{need.heads} heads" + (f" on {need.kv_heads}" if need.kv_heads != need.heads else "")
    dtype = str(need.dtype).removeprefix("torch.")
    deterministic = ", deterministic" if need.deterministic else ""
    softcap = f", softcap {need.softcap:g}" if need.softcap else ""
    packed = ", packed" if need.packed else ""
    more = f"{packed}{softcap}{deterministic}{', the same bits in any company' if need.invariant else ''}"
    return f"{dtype} on {need.device}{capability}, {heads}, {head_dim}, {forms} blocks{more}"
