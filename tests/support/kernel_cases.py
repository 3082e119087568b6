"""Kernels, cases and tolerances that the tests of kernels share; `usable` skips with the kernel's own reason."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import pytest
import torch

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.kernels import BlockCall, BlockKernel, Need, Saved, accumulator_dtype
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.kernels.triton.support import interpreted
from dfa_megatron.plan.language.geometry import FULL, Band, Form, form_of
from tests.support.close import assert_close

TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    ("reference", "cuda"),
    ("triton", "cuda"),
    ("aten", "cuda"),
    ("cudnn", "cuda"),
    ("flash4", "cuda"),
]
if interpreted():
    TARGETS = [("triton", "cpu")]
ROUND_ONCE = ("reference", "cpu")
"""Kernels that compute 16-bit inputs in float32 and round at the end."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}
COARSE = {torch.bfloat16: (5e-3, 1.2e-2), torch.float16: (7e-4, 1.6e-3)}
"""(out, gradients) for kernels that multiply 16-bit probabilities."""


@dataclass(frozen=True)
class Case:
    q_len: int
    kv_len: int
    band: Band = FULL
    heads: int = 2 if interpreted() else 3  # a program takes half a second there
    kv_heads: int = 2 if interpreted() else 3
    head_dim: int = 32
    head_dim_v: int = 0
    batch: int = 1 if interpreted() else 2

    def __str__(self) -> str:
        band = "full" if self.band.is_full else f"band{self.band.left},{self.band.right}"
        head_dim = f"{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")
        return f"{self.q_len}x{self.kv_len}-{band}-h{self.heads}:{self.kv_heads}-d{head_dim}-b{self.batch}"


def _of_targets(targets: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "device"), targets, ids=[f"{name} on {device}" for name, device in targets])


every_target = _of_targets(TARGETS)
every_capping = _of_targets([target for target in TARGETS if kernels.get(target[0]).caps_scores])
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))


def usable(name: str, device: str, dtype: torch.dtype, *cases: Case, **asked: bool) -> BlockKernel:
    """The kernel, or a skip with its own reason; `asked` has more of the `Need`."""
    forms: frozenset[Form] = frozenset(form_of(case.band, case.q_len, case.kv_len) for case in cases)
    present, case, capability = torch.cuda.is_available(), cases[0], None
    if device == "cuda":
        capability = torch.cuda.get_device_capability() if present else (9, 0)
    sizes = case.heads, case.kv_heads, case.head_dim, case.head_dim_v or case.head_dim
    kernel = kernels.get(name)
    if (why := kernels.refusal(kernel, Need(device, dtype, *sizes, forms, capability=capability, **asked))) is not None:
        pytest.skip(f"{name}: {why}")
    if device == "cuda" and not present:
        pytest.skip("no CUDA device")
    return kernel


@dataclass
class Problem:
    """A call in a dtype, its dout, and what float64 makes of exactly its inputs: (out, lse, dq, dk, dv)."""

    call: BlockCall
    dout: torch.Tensor
    want: tuple[torch.Tensor, ...]

    @property
    def lse(self) -> torch.Tensor:
        return self.want[1]

    def part(self, rows: slice, columns: slice, band: Band) -> tuple[BlockCall, torch.Tensor]:
        """The call of some rows and columns alone, and its rows of dout."""
        call = self.call
        inputs = call.q[:, rows], call.k[:, columns], call.v[:, columns]
        return BlockCall.of(*inputs, band, call.softmax_scale), self.dout[:, rows]

    def check(self, name: str, got: tuple[torch.Tensor, ...], *, tanh: float = 0.0) -> None:
        """Compare in relative Frobenius norms.

        Args:
            tanh: what an approximate one may add.
        """
        dtype = self.call.q.dtype
        exact = name in ROUND_ONCE or dtype not in COARSE
        of_out, of_gradients = (TOLERANCE[dtype],) * 2 if exact else COARSE[dtype]
        of_lse = 1e-12 if dtype == torch.float64 else 1e-5
        limits = (max(of_out, tanh), max(of_lse, tanh / 10), *(max(of_gradients, tanh),) * 3)
        for label, g, w, limit in zip(NAMES, got, self.want, limits, strict=True):
            assert g.dtype == (accumulator_dtype(dtype) if label == "lse" else dtype), label
            # One key a row: its probability is 1 whatever the score, and dq and dk are rounding alone.
            assert_close(g, w, tolerance=limit if w.any() else limit * self.want[0].norm().item(), name=label)


NAMES = ("out", "lse", "dq", "dk", "dv")


def visible(segments: Segments, device: str = "cpu") -> torch.Tensor:
    """The pairs of all segments."""
    seen = torch.zeros(segments.q_len, segments.kv_len, dtype=torch.bool)
    for s in segments.parts:
        i, j = torch.arange(s.q_lo, s.q_hi)[:, None], torch.arange(s.kv_lo, s.kv_hi)[None]
        seen[s.q_lo : s.q_hi, s.kv_lo : s.kv_hi] = (j - i >= s.tile.lo) & (j - i <= s.tile.hi)
    return seen.to(device)


def problem(
    case: Case, dtype: torch.dtype, device: str, *, gain: float = 1.0, scale: float = 0.7, softcap: float = 0.0,
    segments: Segments | None = None,
) -> Problem:  # fmt: skip
    """Fresh inputs, seeded by what they are for.

    Args:
        gain: of q. scale: of scores, times sqrt(head_dim).
        segments: in place of the case's band.
    """
    more = f"{softcap}" if softcap else ""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}{dtype}{gain}{more}".encode()))
    head_dim_v = case.head_dim_v or case.head_dim

    def draw(length: int, heads: int, head_dim: int) -> torch.Tensor:
        values = torch.randn(case.batch, length, heads, head_dim, generator=generator, dtype=torch.float64)
        return values.to(dtype).to(device)

    q = draw(case.q_len, case.heads, case.head_dim) * gain
    k = draw(case.kv_len, case.kv_heads, case.head_dim)
    v = draw(case.kv_len, case.kv_heads, head_dim_v)
    dout = draw(case.q_len, case.heads, head_dim_v)
    scale = scale / math.sqrt(case.head_dim)
    sees = case.band if segments is None else visible(segments, device)
    leaves = tuple(x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v))
    out, lse = dense_attention(*leaves, sees, softmax_scale=scale, softcap=softcap)
    gradients = torch.autograd.grad(out, leaves, dout.double())
    segments = segments or Segments.one(case.band, case.q_len, case.kv_len)
    return Problem(BlockCall(q, k, v, segments, scale, softcap), dout, (out.detach(), lse.detach(), *gradients))


def saved_for(kernel: BlockKernel, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Saved:
    """What the kernel reads, and nothing else."""
    if kernel.backward_needs == "out":
        return Saved(lse=lse, out=out)
    wide = accumulator_dtype(out.dtype)
    return Saved(lse=lse, minus_delta=-(dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2))


def run(kernel: BlockKernel, call: BlockCall, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(out, lse, dq, dk, dv) of a call."""
    out, lse = kernel.forward(call)
    return out, lse, *kernel.backward(call, dout, saved_for(kernel, dout, out, lse))


LAYOUTS = ["sbhd", "bhsd", "slice of fused", "rows of longer", "last dimension strided", "misaligned"]


def as_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values as a view of differently laid out memory."""
    b, s, h, d = x.shape
    if layout == "sbhd":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "bhsd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice of fused":
        memory = x.new_full((b, s, h, 3 * d), math.nan)
        memory[..., d : 2 * d] = x
        return memory[..., d : 2 * d]
    if layout == "rows of longer":
        memory = x.new_full((b, s + 5, h, d), math.nan)
        memory[:, 3:-2] = x
        return memory[:, 3:-2]
    if layout == "last dimension strided":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    assert layout == "misaligned"
    memory = x.new_full((x.numel() + 1,), math.nan)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)
