"""Try kernels on attentions: refusals, distance from float64, speed, and what "auto" takes."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

import torch

from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.doctor.world import stopwatch
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import KERNELS, BlockCall, BlockKernel, Need, Saved, get, select
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Form, Segment, form_of
from dfa_megatron.plan.language.mask import Mask

logger = logging.getLogger(__name__)

COMPILED = ("flash4", "triton")
"""Kernels that compile when they are first called."""
RESULTS = ("out", "lse", "dq", "dk", "dv")

LIMITS: Mapping[torch.dtype, tuple[float, float, float]] = MappingProxyType(
    {
        torch.float64: (1e-12, 1e-12, 1e-12),
        torch.float32: (4e-6, 1e-5, 4e-6),
        torch.bfloat16: (5e-3, 1e-5, 1.2e-2),
        torch.float16: (7e-4, 1e-5, 1.6e-3),
    }
)
"""Limits on the errors of out, of lse and of gradients; they are the limits of the conformance suite."""

Action = Callable[[], object]
TrialTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k, v, dout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One attention; sizes as in `dfa_megatron.kernels`."""

    q_len: int
    kv_len: int
    band: Band
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: str
    batch: int = 1

    @classmethod
    def square(
        cls, tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, batch: int = 1
    ) -> Trial:
        """Return causal attention of tokens over themselves."""
        return cls(
            q_len=tokens, kv_len=tokens, band=CAUSAL, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            head_dim_v=head_dim, dtype=dtype, device=device, batch=batch,
        )  # fmt: skip

    def need(self) -> Need:
        """Return the need that a kernel must serve."""
        cuda = torch.device(self.device).type == "cuda"
        return Need(
            self.device, self.dtype, self.heads, self.kv_heads, self.head_dim, self.head_dim_v,
            frozenset({form_of(self.band, self.q_len, self.kv_len)}),
            capability=torch.cuda.get_device_capability(self.device) if cuda else None,
        )  # fmt: skip

    def inputs(self, seed: int = 0) -> TrialTensors:
        """Return fresh normal values."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(length: int, heads: int, head_dim: int) -> torch.Tensor:
            shape = (self.batch, length, heads, head_dim)
            wide = torch.float32 if self.dtype.itemsize < 4 else self.dtype
            return torch.randn(shape, generator=generator, device=self.device, dtype=wide).to(self.dtype)

        q, k = draw(self.q_len, self.heads, self.head_dim), draw(self.kv_len, self.kv_heads, self.head_dim)
        return (
            q, k, draw(self.kv_len, self.kv_heads, self.head_dim_v), draw(self.q_len, self.heads, self.head_dim_v),
        )  # fmt: skip

    def call(self, inputs: TrialTensors, *, deterministic: bool = False) -> BlockCall:
        """Return the kernel call over these inputs, with the usual scale."""
        q, k, v, _ = inputs
        return BlockCall.of(q, k, v, self.band, 1 / math.sqrt(self.head_dim), deterministic=deterministic)

    @property
    def pairs(self) -> int:
        """Return the number of (query, key) pairs that the band holds."""
        return Segment(0, self.q_len, 0, self.kv_len, self.band).tile.area

    def operations(self, phase: str) -> float:
        """Return floating-point operations of the band's pairs; the backward has 2.5 times as many as the forward."""
        forward = 2.0 * self.batch * self.heads * self.pairs * (self.head_dim + self.head_dim_v)
        return forward if phase == "forward" else 2.5 * forward


def saved_for(kernel: BlockKernel, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Saved:
    """Return the tensors of a forward that the kernel's backward reads."""
    if kernel.backward_needs == "out":
        return Saved(lse, out=out)
    return Saved(lse, minus_delta=minus_delta(dout, out))


def run(
    kernel: BlockKernel, trial: Trial, inputs: TrialTensors, *, deterministic: bool = False
) -> tuple[torch.Tensor, ...]:
    """Return (out, lse, dq, dk, dv) of the kernel."""
    call, dout = trial.call(inputs, deterministic=deterministic), inputs[3]
    out, lse = kernel.forward(call)
    return out, lse, *kernel.backward(call, dout, saved_for(kernel, dout, out, lse))


def errors(kernel: BlockKernel, trial: Trial, seed: int = 0) -> dict[str, float]:
    """Return the error of each result relative to the norm of dense attention on the same inputs."""
    inputs = trial.inputs(seed)
    return distances(run(kernel, trial, inputs), exact(inputs, trial.band), inputs[3], trial.kv_len)


def exact(inputs: TrialTensors, visible: Band | Mask, softcap: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Return (out, lse, dq, dk, dv) by the definition, in float64."""
    q, k, v = (x.to(torch.float64, copy=True).requires_grad_() for x in inputs[:3])
    out, lse = dense_attention(q, k, v, visible, softcap=softcap)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())


def distances(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], dout: torch.Tensor, kv_len: int
) -> dict[str, float]:
    """Return |got - want| / |want| of each result; infinite for a NaN, another shape or a misplaced infinity.

    Where rows see one key, dq and dk are 0 and only rounding is left. They are compared with their usual norm, which
    follows from dout and kv_len.
    """
    usual = 0.05 * float(dout.double().norm()) / math.sqrt(kv_len)
    found = {}
    for name, mine, exactly in zip(RESULTS, got, want, strict=True):
        found[name] = math.inf
        if mine.shape != exactly.shape:
            continue
        a, finite = mine.double(), exactly.isfinite()
        if not bool((a.isnan() | ((a != exactly) & (a.isinf() | ~finite))).any()):
            error, norm = (torch.where(finite, x, 0.0).norm() for x in (a - exactly, exactly))
            found[name] = float(error) / (max(float(norm), usual if name in ("dq", "dk") else 0.0) or 1.0)
    return found


def wrong(found: Mapping[str, float], dtype: torch.dtype, slack: float = 1.0) -> list[str]:
    """Return the results whose error is above the limit, or above `slack` times the limit."""
    out, lse, gradients = (slack * limit for limit in LIMITS[dtype])
    limits = {"out": out, "lse": lse, "dq": gradients, "dk": gradients, "dv": gradients}
    return [name for name, error in found.items() if not error <= limits[name]]


def seconds(kernel: BlockKernel, trial: Trial, repetitions: int = 7) -> dict[str, float]:
    """Median seconds of a forward and of a backward, after two to warm up (and compile) each."""
    device = torch.device(trial.device)
    return {
        phase: statistics.median([stopwatch(call, device) for _ in range(2 + repetitions)][2:])
        for phase, call in passes(kernel, trial).items()
    }


def passes(kernel: BlockKernel, trial: Trial, inputs: TrialTensors | None = None) -> dict[str, Callable[[], object]]:
    """Return a forward and a backward as calls that can be repeated."""
    inputs = trial.inputs() if inputs is None else inputs
    call, dout = trial.call(inputs), inputs[3]
    saved = saved_for(kernel, dout, *kernel.forward(call))
    return {
        "forward": functools.partial(kernel.forward, call),
        "backward": functools.partial(kernel.backward, call, dout, saved),
    }


FORMS: dict[Form, tuple[int, int, Band]] = {
    "causal": (257, 257, CAUSAL),
    "full": (257, 193, FULL),
    "band": (257, 193, Band(100, 20)),
}
"""(q_len, kv_len, band) on which each form is checked: no length is a multiple of a block, some rows see nothing."""


@dataclass(slots=True)
class Verdict:
    """The findings about one kernel.

    refused: the reason why it cannot serve the shape, or None. without: the reason why it serves no band, if it serves
    the rest.
    errors: by form and result, relative to float64. wrong: the results beyond the limit, or the exception that ended
    it.
    tflops: by phase, 1e12 floating-point operations per second. untimed: the reason why there are none.
    """

    name: str
    refused: str | None = None
    without: str | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    tflops: dict[str, float] = field(default_factory=dict)
    untimed: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return plain values; an infinite error is null."""
        finite = {
            form: {name: error if math.isfinite(error) else None for name, error in found.items()}
            for form, found in self.errors.items()
        }
        return asdict(self) | {"errors": finite}


def of_form(shape: Trial, form: Form) -> Trial:
    """Return the short attention on which a form is checked: heads per kv head, head_dim and dtype are the shape's."""
    q_len, kv_len, band = FORMS[form]
    heads = 2 * (shape.heads // shape.kv_heads)
    return replace(shape, q_len=q_len, kv_len=kv_len, band=band, heads=heads, kv_heads=2, batch=1)


def examine(
    shape: Trial, names: Iterable[str] = (), repetitions: int = 7, forms: Iterable[Form] = FORMS, between: Action = bool
) -> list[Verdict]:
    """Return a verdict for each kernel (all of them, or the named ones), best first; wrong ones are not timed.

    `shape` is timed; errors are taken on short lengths, see `of_form`. between: called once before anything is timed.

    Raises:
        UnsupportedError: there is no kernel of a name.
    """
    chosen, forms = [get(name) for name in names] or KERNELS.values(), tuple(forms)
    verdicts = {kernel: _verdict(kernel, shape, forms) for kernel in chosen}
    between()
    for kernel, verdict in verdicts.items():
        if verdict.refused is None and not verdict.wrong:
            _time(kernel, shape, repetitions, verdict)
    return list(verdicts.values())


def compile_ahead(shape: Trial, names: Iterable[str], forms: Iterable[Form]) -> None:
    """Compile what `examine` checks on GPUs, if it is several, side by side into the caches on disk that it reads."""
    chosen = [get(name) for name in names] or KERNELS.values()
    some = [kernel for kernel in chosen if kernel.name in COMPILED and kernel.refusal(shape.need()) is None]
    todo = [(kernel, of_form(shape, form)) for kernel in some for form in forms]
    if shape.device == "cpu" or len(todo) < 2:
        return
    said = ", ".join(kernel.name for kernel in some)
    print(f"compiling {said}, once for this machine", file=sys.stderr, flush=True)
    with multiprocessing.get_context("spawn").Pool(len(todo), _hush) as pool:
        pool.starmap_async(errors, todo, 1).wait(120.0)  # what is left then is compiled where it is needed


def _hush() -> None:
    for standard in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), standard)


def automatic(shape: Trial) -> str | None:
    """Return the kernel that "auto" takes for the shape, or None."""
    try:
        return select("auto", shape.need()).name
    except UnsupportedError:
        return None


def _verdict(kernel: BlockKernel, shape: Trial, forms: Iterable[Form]) -> Verdict:
    verdict = Verdict(kernel.name, refused=kernel.refusal(shape.need()))
    if verdict.refused is not None:
        return verdict
    for form in forms:
        small = of_form(shape, form)
        if (why := kernel.refusal(small.need())) is not None:
            verdict.without = f"{form}: {why}"
            continue
        try:
            verdict.errors[form] = errors(kernel, small)
        except Exception as error:  # a kernel that claims to be usable may fail in any way
            logger.debug("%s failed", kernel.name, exc_info=True)
            verdict.wrong.append(f"{form}: {type(error).__name__}: {error}")
            continue
        verdict.wrong += [f"{form} {name}" for name in wrong(verdict.errors[form], shape.dtype)]
    return verdict


def _time(kernel: BlockKernel, shape: Trial, repetitions: int, verdict: Verdict) -> None:
    if kernel.name == "reference" and shape.batch * shape.heads * shape.q_len * shape.kv_len > 1 << 28:
        verdict.untimed = "it keeps the whole score matrix in memory"
        return
    try:
        taken = seconds(kernel, shape, repetitions)
    except torch.OutOfMemoryError:
        verdict.untimed = "the device's memory is too small for the shape"
        return
    except Exception as error:  # as above
        logger.debug("%s failed", kernel.name, exc_info=True)
        verdict.wrong.append(f"timed shape: {type(error).__name__}: {error}")
        return
    verdict.tflops = {phase: shape.operations(phase) / taken[phase] / 1e12 for phase in taken}
