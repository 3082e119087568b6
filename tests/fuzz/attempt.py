"""Run one case and judge it: right, wrong, refused for a reason that may be, or an error that may not."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.adapters import gpu
from dfa_megatron.runtime.execute.sinks_and_slopes import merge_sinks, sinks_gradient
from dfa_megatron.runtime.request import Request
from tests.fuzz.deadline import within
from tests.fuzz.random_case import Case
from tests.fuzz.truth import Results, Tensors, dense, distances, rows_of, tensors
from tests.support.arguments import arguments
from tests.support.nan_memory import nan_memory
from tests.support.together import backward_together, forward_together, prepare_together

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold the outcome of a case, on one rank or in all.

    kind: "right", "refused", "failed", or "unfinished" where a run's time was over. reason: of a refusal, or what is
    wrong. worst: the largest distance from the truth, as a share of what is tolerated.
    """

    number: int
    kind: str
    reason: str = ""
    worst: float = 0.0
    distances: dict[str, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def attempt(case: Case, rank: int = 0, group: Any = None) -> Verdict:
    """Run a case, or this rank's part of it, and judge.

    Args:
        group: of real ranks; None where all are in this process.
    """
    try:
        given = tensors(case)
        want = dense(case, given)
        poisoned = contextlib.nullcontext() if case.compiled else nan_memory()
        with poisoned:
            if case.public:
                found = _public(case, given, want, rank, group)
            else:
                found = distances(case, _together(case, given), want, given)
    except UnsupportedError as error:
        if case.checkpoint != "none":
            gc.collect()  # until then PyTorch 2.6 keeps the hooks of a checkpoint that ended with an error
        text = str(error)
        why = legitimate(case, text)
        return Verdict(case.number, "refused", why) if why else Verdict(case.number, "failed", f"refused: {text}")
    except Exception:  # noqa: BLE001  # whatever it is, the run goes on and reports it
        return Verdict(case.number, "failed", traceback.format_exc(limit=-6))
    finally:
        if case.compiled:
            torch._dynamo.reset()
    worst = max(found.values())
    if worst <= 1:
        return Verdict(case.number, "right", worst=worst, distances=found)
    off = ", ".join(f"{name} {share:.3g}" for name, share in found.items() if not share <= 1)
    return Verdict(case.number, "failed", f"wrong, in units of the tolerance: {off}", worst, found)


def attempts(
    drawn: Callable[[int], Case], numbers: Iterable[int], limit: float, deadline: float
) -> Iterator[tuple[Case, Verdict]]:
    """Draw and judge one case after another; none begins after the deadline.

    A case may take `limit` seconds, and the caller's work on its verdict counts: a lost GPU hangs there.
    """
    for number in numbers:
        if time.monotonic() > deadline:
            return
        case = drawn(number)
        with within(limit, case.line):
            yield case, attempt(case)


REFUSALS: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    ("two head_dims on the cpu kernel", r"it needs head_dim \(", lambda c: c.head_dim != c.head_dim_v),
    ("a softcap on a kernel that caps no scores", r"it caps no scores", lambda c: c.options["softcap"] > 0),
    ("ALiBi on a kernel that adds no bias", r"it adds no ALiBi bias", lambda c: c.alibi),
    (
        "a balanced schedule of a mask that looks ahead",
        r"the balanced schedule on this mask .* pairs causal work only",
        lambda c: "balanced" in c.options["schedule"] and c.looks_ahead,
    ),
    (
        "copy engines that do not reach all ranks",
        r"transport='copy_engine'",
        lambda c: c.options.get("transport") == "copy_engine",
    ),
    (
        "exchanged heads of load_balanced tokens",
        r"ulysses_degree=\d+ in layout 'load_balanced'",
        lambda c: c.options["layout"] == "load_balanced" and c.options["ulysses_degree"] not in (1, "auto"),
    ),
    (
        "a degree that does not divide ranks and heads",
        r"ulysses_degree=\d+ (on a group|with \d+ heads)",
        lambda c: (
            c.options["ulysses_degree"] != "auto" and any(x % c.options["ulysses_degree"] for x in (c.ranks, c.heads))
        ),
    ),
)
"""Refusals that a case may meet: a name, a pattern of the message, and a test that the case must pass."""


_KERNEL_REFUSES = re.compile(r"kernel='(\w+)' for .*? is not supported: (.{1,80})")
"""A kernel's refusal on a GPU, where every kernel has shapes of its own."""


def legitimate(case: Case, text: str) -> str:
    """Return the name of the refusal, or "" for an unknown one."""
    if case.device != "cpu" and case.options["kernel"] != "auto" and (told := _KERNEL_REFUSES.match(text)):
        return f"kernel {told[1]}: {told[2]}"
    return next((name for name, pattern, fits in REFUSALS if fits(case) and re.search(pattern, text)), "")


def _together(case: Case, given: Tensors) -> Results:
    """All ranks in this process."""
    scale = case.options["softmax_scale"]
    options = case.options | {"softmax_scale": case.head_dim**-0.5 if scale is None else scale}
    documents = case.offsets if case.packed else ()
    request = Request(
        **arguments(**options),
        sinks=case.sinks,
        alibi=case.alibi,
        deterministic=case.deterministic,
        cu_seqlens=documents,
    )
    where = [rows_of(case, rank) for rank in range(case.ranks)]
    q, k, v, dout = ([x[:, rows] for rows in where] for x in (given.q, given.k, given.v, given.dout))
    prepared = prepare_together(request, q, k, v)
    assert len({(p.kernel.name, p.rank_plan.digest) for p in prepared}) == 1, "ranks chose other kernels or plans"
    results = forward_together(prepared, q, k, v, given.slopes)
    if given.sinks is not None:
        results = [merge_sinks(out, lse, given.sinks) for out, lse in results]
    outs, lses = [out for out, _ in results], [lse for _, lse in results]
    backward = functools.partial(backward_together, prepared, dout, q, k, v, outs, lses, given.slopes)
    gradients = backward()
    if case.deterministic:
        again = backward()
        same = all(torch.equal(x, y) for a, b in zip(gradients, again, strict=True) for x, y in zip(a, b, strict=True))
        assert same, "deterministic gradients differ from run to run"
    dsinks = None
    if given.sinks is not None:
        shares = zip(dout, outs, lses, strict=True)
        dsinks = torch.stack([sinks_gradient(*share, given.sinks) for share in shares]).sum(0)
    assert {x.dtype for x in (*outs, *(g for three in gradients for g in three))} == {given.q.dtype}
    order = torch.cat(where).argsort()
    dq, dk, dv = (torch.cat([three[at] for three in gradients], 1)[:, order] for at in range(3))
    return Results(torch.cat(outs, 1)[:, order], torch.cat(lses, 2)[:, :, order], dq, dk, dv, dsinks)


def _public(case: Case, given: Tensors, want: Results, rank: int, group: Any) -> dict[str, float]:
    """This rank's part of the results against the rows that it has of the whole."""
    rows = rows_of(case, rank)
    q, k, v, dout = (x[:, rows] for x in (given.q, given.k, given.v, given.dout))
    mine = Tensors(q, k, v, dout, given.sinks, given.slopes)
    for call in range(4 if case.number % 2 else 0):  # the second run is recorded, and the third replays it
        _run_public(
            case, call, Tensors(q.flip(1), k.flip(1), v.flip(1), dout.flip(1), given.sinks, given.slopes), group
        )
    got = _run_public(case, 4, mine, group)
    if case.deterministic:
        again = _run_public(case, 4, mine, group)
        same = all(torch.equal(getattr(got, name), getattr(again, name)) for name in ("dq", "dk", "dv"))
        assert same, "deterministic gradients differ from run to run"
    out, dq, dk, dv = (x[:, rows] for x in (want.out, want.dq, want.dk, want.dv))
    return distances(case, got, Results(out, want.lse[:, :, rows], dq, dk, dv, want.dsinks), given)


def _run_public(case: Case, call: int, given: Tensors, group: Any) -> Results:
    """One forward and backward of the public function, inside the checkpoint or the compiler of the case.

    Each is under states of PyTorch that the case draws for this call: they change no number.
    """
    options = {
        **arguments(**case.options),
        "alibi_slopes": given.slopes,
        "group": group if case.ranks > 1 else "",
        "return_lse": True,
    }

    def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Any:
        q, k, v = q * 1.0, k * 1.0, v * 1.0
        if not case.packed:
            out, lse = dfa_megatron.dist_flash_attn_func(q, k, v, sinks=sinks, **options)
            return out * 1.0, lse
        flat = q[0], k[0], v[0]
        out, lse = dfa_megatron.dist_flash_attn_varlen_func(*flat, case.offsets, sinks=sinks, **options)
        return out[None] * 1.0, lse[None]

    run: Any = torch.compile(region, backend="aot_eager") if case.compiled else region
    leaves = [x.detach().clone().requires_grad_() for x in (given.q, given.k, given.v)]
    sinks = None if given.sinks is None else given.sinks.clone().requires_grad_()
    draw = random.Random(f"{case.seed} {case.number} {call}")
    forward, backward = (draw.choice(_STATES)(case.device) for _ in range(2))
    with forward, gpu.deterministic_algorithms(case.deterministic):
        out, lse = _CHECKPOINTS[case.checkpoint](run, *leaves, sinks)
    with backward, gpu.deterministic_algorithms(case.deterministic):
        out.backward(given.dout)  # re-entrant checkpoints take no other
    dq, dk, dv = (x.grad for x in leaves)
    assert dq is not None and dk is not None and dv is not None  # noqa: PT018
    assert {x.dtype for x in (out, dq, dk, dv)} == {given.q.dtype}
    dsinks = None if sinks is None else sinks.grad
    if dsinks is not None and case.ranks > 1:
        dist.all_reduce(dsinks, group=group)
    return Results(out.detach(), lse.detach(), dq, dk, dv, dsinks)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_STATES: tuple[Callable[[str], contextlib.AbstractContextManager[Any]], ...] = (
    contextlib.nullcontext,
    lambda device: torch.autocast(torch.device(device).type, torch.bfloat16),
    lambda device: torch.autocast(torch.device(device).type, torch.float16),
    lambda _: _default_dtype(torch.float64),
    lambda _: _default_dtype(torch.bfloat16),
)
"""States of PyTorch around a forward or a backward, by the device."""


def _no_checkpoint(region: Attend, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return region(*inputs)


_CHECKPOINTS: dict[str, Any] = {
    "none": _no_checkpoint,
    "full": functools.partial(checkpoint, use_reentrant=False),
    "remat": remat.remat_checkpoint,
    "remat, not re-entrant": functools.partial(checkpoint, use_reentrant=False, context_fn=remat.context_fn),
    "remat on the host": functools.partial(remat.remat_checkpoint, offload=True),
}
