"""Run one attention and judge it: right, wrong, refused for a reason that may be, or an error that may not."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dfa_megatron import remat
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.adapters import shared
from dfa_megatron.runtime.comm.symmetric_memory import KeptArena
from tests.fuzz.outcome import Outcome
from tests.fuzz.random_case import Case
from tests.support.attend import Results, States, assert_same_bits, results, results_together, shares
from tests.support.live_bytes import held
from tests.support.nan_memory import nan_memory

MOST_RESERVED = 6 << 30
"""Bytes of GPU memory that a process keeps for its next case: others share the GPU."""


def attempt(case: Case, rank: int = 0, ranks: int = 1, folder: str = "") -> Outcome:
    """Run a case, or this rank's part of it, and judge."""
    try:
        before = _before(case)
        with contextlib.nullcontext() if case.compiled else nan_memory():
            found = _public(case, rank) if case.public else _together(case)
        found["what stays"] = _stays(case, before)
    except UnsupportedError as error:
        if case.checkpoint != "none":
            gc.collect()  # until then PyTorch 2.6 keeps the hooks of a checkpoint that ended with an error
        why = legitimate(case, str(error))
        return Outcome(case.number, *(("refused", why) if why else ("failed", f"refused: {error}")))
    except Exception:  # noqa: BLE001  # whatever it is, the run goes on and reports it
        return Outcome(case.number, "failed", traceback.format_exc(limit=-6))
    finally:
        if case.compiled:
            torch._dynamo.reset()
        if case.whole.device != "cpu" and torch.cuda.memory_reserved() > MOST_RESERVED:
            torch.cuda.empty_cache()
    worst = max(found.values())
    off = ", ".join(f"{name} {share:.3g}" for name, share in found.items() if not share <= 1)
    kind = ("wrong", f"in units of the tolerance: {off}") if off else ("right", "")
    return Outcome(case.number, *kind, worst if worst < float("inf") else 1e9)


REFUSALS: tuple[tuple[str, str, Callable[[Case], bool]], ...] = (
    ("two head_dims on the cpu kernel", r"it needs head_dim \(", lambda c: c.whole.head_dim != c.whole.head_dim_v),
    ("a softcap on a kernel that caps no scores", r"it caps no scores", lambda c: c.whole.softcap > 0),
    (
        "a balanced schedule of a mask that looks ahead",
        r"the balanced schedule on this mask.* pairs causal work only",
        lambda c: "balanced" in c.options["schedule"] and c.looks_ahead,
    ),
    (
        "copy engines that do not reach all ranks",
        r"transport='copy_engine'",
        lambda c: c.options.get("transport") == "copy_engine",
    ),
    (
        "exchanged heads of load_balanced tokens",
        r"ulysses_degree=\d+ for two sequences",
        lambda c: c.whole.keys > 0 and c.options["ulysses_degree"] not in (1, "auto"),
    ),
    (
        "a degree that does not divide ranks and heads",
        r"ulysses_degree=\d+ (on a group|with \d+ heads)",
        lambda c: (
            c.options["ulysses_degree"] != "auto"
            and any(x % c.options["ulysses_degree"] for x in (c.ranks, c.whole.heads))
        ),
    ),
)
"""Refusals that a case may meet: a name, a pattern of the message, and a test that the case must pass."""


_KERNEL_REFUSES = re.compile(r"kernel='(\w+)' for .*?: (.{1,80})")
"""A kernel's refusal on a GPU, where every kernel has shapes of its own."""


def legitimate(case: Case, text: str) -> str:
    """Return the name of the refusal, or "" for an unknown one."""
    on_gpu = case.whole.device != "cpu" and case.options["kernel"] != "auto"
    if on_gpu and (told := _KERNEL_REFUSES.search(text)):
        return f"kernel {told[1]}: {told[2]}"
    return next((name for name, pattern, fits in REFUSALS if fits(case) and re.search(pattern, text)), "")


def _before(case: Case) -> dict[int, int] | None:
    """Return what tensors hold before the case; None if this case does not ask what it leaves."""
    if not case.public or case.compiled or case.number % 4 != 1:
        return None
    case.whole.exact  # noqa: B018 -- it is kept with the case
    return held()


def _stays(case: Case, before: dict[int, int] | None) -> float:
    """Return the bytes of the largest tensor that the case leaves, over a table of all tokens, or of the segments.

    The triton kernel's table of segments has up to 7 int32 for every block of 16 tokens of each. A launch that gathers
    keys has an int64 for each, more than tokens where tiles share them. Memory for messages stays by intent. 0 if they
    are fewer.
    """
    whole = case.whole
    sides = [hi - lo for lo, hi in pairwise(whole.offsets)] or [max(len(t.q), len(t.kv)) for t in case.mask.tiles]
    has_table = case.options["kernel"] in ("triton", "triton" if whole.device == "cpu" else "auto")
    blocks = sum(-(-side // 16) for side in sides) if has_table else 0
    gathered = sum(len(tile.kv) for tile in case.mask.tiles)
    most = max(8 * whole.length, 8 * whole.columns, 8 * gathered, 28 * blocks)
    deadline = time.monotonic() + 2
    while before is not None:  # another thread may hold a small tensor for a moment
        known = {*before, *_arenas()}
        left = max((n for storage, n in held().items() if storage not in known), default=0)
        if left <= most:
            break
        if time.monotonic() > deadline:
            return left / most
        time.sleep(0.05)
    return 0.0


def _arenas() -> set[int]:
    """Return the storages that messages land in, which a group keeps between calls: 2 MiB from the first on."""
    kept = [x for x in gc.get_objects() if issubclass(type(x), KeptArena)]
    return {x._arena.untyped_storage()._cdata for x in kept}


def _together(case: Case) -> dict[str, float]:
    """All ranks in this process."""
    found = results_together(case.whole, case.ranks, deterministic=case.deterministic, **case.options)
    return shares(case.whole, found, drawn=True)


def _public(case: Case, rank: int) -> dict[str, float]:
    """This rank's part of the results against the rows that it has of the whole, of every call the worst."""
    held = case.options["layout"]
    rows = case.whole.rows(rank, case.ranks, held), case.whole.rows(rank, case.ranks, held, "kv")
    other = replace(case.whole, seed=case.whole.seed + 1)
    # The second run is recorded, and the third replays it.
    calls = range(4 if case.number % 2 else 0)
    found = [shares(other, _call(case, other, call, rank), rows, drawn=True) for call in calls]
    got = _call(case, case.whole, 4, rank)
    if case.deterministic:
        assert_same_bits(got, _call(case, case.whole, 4, rank))
    found.append(shares(case.whole, got, rows, drawn=True))
    return {name: max(one[name] for one in found) for name in found[-1]}


def _call(case: Case, whole: Any, call: int, rank: int) -> Results:
    """One forward and backward, inside the checkpoint or the compiler of the case.

    Each is under states of PyTorch that the case draws for this call: they change no number.
    """

    def way(region: Callable[..., Any], *leaves: torch.Tensor) -> Any:
        def inner(*x: torch.Tensor) -> Any:
            out, lse = region(*(y * 1.0 for y in x[:3]), *x[3:])
            return out * 1.0, lse

        run: Any = torch.compile(inner, backend="aot_eager") if case.compiled else inner
        return CHECKPOINTS[case.checkpoint](run, *leaves)

    dice = random.Random(f"{case.seed} {case.number} {call}")
    few = case.compiled or whole.device != "cpu"
    among = STATES[: TRACED if few else UNTRACED if case.checkpoint == "none" else RECOMPUTED]
    group = dist.group.WORLD if case.ranks > 1 else _alone()
    states = [_states(dice.choice(among), whole.device, case.deterministic) for _ in range(2)]
    return results(whole, rank, case.ranks, way=way, states=(states[0], states[1]), group=group, **case.options)


@functools.cache
def _alone() -> dist.ProcessGroup | None:
    """Return a group of this process, where it is one of several that each draw cases."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True) if dist.is_initialized() else None


def _states(drawn: Callable[[str], contextlib.AbstractContextManager[Any]], device: str, deterministic: bool) -> States:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with drawn(device), shared.deterministic_algorithms(deterministic):
            yield

    return both


class Rounds(TorchFunctionMode):
    """Rounds what any function of PyTorch returns, as modes for low precision do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        whole = isinstance(found, torch.Tensor) and found.is_floating_point() and "Tensor" in str(function)
        return found.bfloat16().to(found.dtype) if whole and not found.requires_grad else found


class Listens(TorchDispatchMode):
    """Passes every operation on: attention is then an operator of torch.library."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _switched(get: Callable[[], Any], put: Callable[[Any], object], to: Any) -> Iterator[None]:
    before = get()
    put(to)
    try:
        yield
    finally:
        put(before)


def _default(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    return _switched(torch.get_default_dtype, torch.set_default_dtype, dtype)


STATES: tuple[Callable[[str], contextlib.AbstractContextManager[Any]], ...] = (
    lambda device: contextlib.nullcontext(),
    lambda device: torch.autocast(torch.device(device).type, torch.bfloat16),
    lambda device: torch.autocast(torch.device(device).type, torch.float16),
    lambda device: _default(torch.float64),
    lambda device: _default(torch.bfloat16),
    lambda device: _switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    lambda device: torch.device("meta"),
    lambda device: Listens(),  # type: ignore[no-untyped-call]
)
"""States of PyTorch around a forward or a backward, by the device."""
TRACED, RECOMPUTED, UNTRACED = 5, 7, 8
"""How many of them a compiled call, or one on a GPU, may meet, one with a checkpoint, and any other."""


def _no_checkpoint(region: Callable[..., Any], *inputs: Any) -> Any:
    return region(*inputs)


CHECKPOINTS: dict[str, Any] = {
    "none": _no_checkpoint,
    "full": functools.partial(checkpoint, use_reentrant=False),
    "remat": remat.remat_checkpoint,
    "remat, not re-entrant": functools.partial(checkpoint, use_reentrant=False, context_fn=remat.context_fn),
    "remat on the host": functools.partial(remat.remat_checkpoint, offload=True),
}
