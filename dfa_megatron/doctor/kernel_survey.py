"""Survey every kernel on one machine: whether it is usable, its errors against float64, its rate, and the choice of
"auto".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

import torch

from dfa_megatron.doctor.kernel_trial import Trial, errors, seconds, wrong
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import KERNELS, get, select
from dfa_megatron.kernels.api import BlockKernel
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Form

logger = logging.getLogger(__name__)

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


def examine(shape: Trial, names: Iterable[str] = (), repetitions: int = 7) -> list[Verdict]:
    """Return a verdict for each kernel (all of them, or the named ones), best first; wrong ones are not timed.

    `shape` is timed; errors are taken on short lengths with the same heads per kv head, head_dim and dtype.

    Raises:
        UnsupportedError: there is no kernel of a name.
    """
    return [_verdict(kernel, shape, repetitions) for kernel in [get(name) for name in names] or KERNELS.values()]


def automatic(shape: Trial) -> str | None:
    """Return the kernel that "auto" takes for the shape, or None."""
    try:
        return select("auto", shape.need()).name
    except UnsupportedError:
        return None


def _verdict(kernel: BlockKernel, shape: Trial, repetitions: int) -> Verdict:
    verdict = Verdict(kernel.name, refused=kernel.refusal(shape.need()))
    if verdict.refused is not None:
        return verdict
    group = shape.heads // shape.kv_heads
    for form, (q_len, kv_len, band) in FORMS.items():
        small = replace(shape, q_len=q_len, kv_len=kv_len, band=band, heads=2 * group, kv_heads=2, batch=1)
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
    if not verdict.wrong:
        _time(kernel, shape, repetitions, verdict)
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
