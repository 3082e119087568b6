"""Recorded runs under other states of PyTorch than those of their recording: five calls each, and no number changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dfa_megatron
from dfa_megatron.runtime.prepare import in_use
from tests.support.arguments import arguments
from tests.support.close import assert_close
from tests.support.workers import run_ranks

ROWS = 8


class Rounds(TorchFunctionMode):
    """Rounds what any function of PyTorch returns, as modes for low precision do."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        whole = isinstance(found, torch.Tensor) and found.is_floating_point() and "Tensor" in str(function)
        return found.bfloat16().to(found.dtype) if whole and not found.requires_grad else found


class Listens(TorchDispatchMode):
    """Passes every operation on."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def switched(get: Callable[[], Any], put: Callable[[Any], object], to: Any) -> Iterator[None]:
    before = get()
    put(to)
    try:
        yield
    finally:
        put(before)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "deterministic": lambda: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "wide": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "narrow": lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    "precision": lambda: switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "device": lambda: torch.device("meta"),
    "functions": Rounds,
    "dispatch": Listens,
}
FORWARD = {**STATES, "inference": torch.inference_mode, "no gradients": torch.no_grad}

KINDS: list[dict[str, Any]] = [
    {"kernel": "reference"},
    {"kernel": "reference", "softcap": 3.0, "causal": False},
    {"kernel": "cpu", "window_size": (3, 0)},
    {"alibi": True, "kv_heads": 1},
    {"sinks": True, "kernel": "reference", "layout": "zigzag"},
    {"kernel": "reference", "dim_v": 5},
]


@contextmanager
def states(names: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(FORWARD[name]())
        yield


def drawn(draw: random.Random, among: dict[str, Any]) -> list[str]:
    return draw.sample(sorted(among), draw.choice((0, 1, 1, 2)))


class Case:
    """Inputs of one rank that stay the same."""

    def __init__(self, draw: random.Random, rank: int, *, kv_heads: int = 2, dim_v: int = 8, **options: Any) -> None:
        torch.manual_seed(draw.randrange(1 << 30) + rank)
        shapes = ((2, ROWS, 4, 8), (2, ROWS, kv_heads, 8), (2, ROWS, kv_heads, dim_v))
        self.x = [torch.randn(shape, requires_grad=True) for shape in shapes]
        self.dout = torch.randn(2, ROWS, 4, dim_v)
        if options.pop("alibi", False):
            options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.125, 0.0625])
        if options.pop("sinks", False):
            self.x.append(torch.tensor([0.1, -0.2, 0.3, 0.0], requires_grad=True))
        self.options = arguments(**options)

    def wanted(self) -> list[torch.Tensor]:
        """Return the same in float64, which no state changes; its recordings are others."""
        wide = object.__new__(Case)
        wide.x, wide.dout = [x.detach().double().requires_grad_() for x in self.x], self.dout.double()
        wide.options = self.options
        return [x.float() for x in wide.run(nullcontext(), nullcontext())]

    def run(self, forward: AbstractContextManager[Any], backward: AbstractContextManager[Any]) -> list[torch.Tensor]:
        """Return out, and gradients where there are some."""
        with forward:
            q, k, v, *sinks = self.x
            more = {"sinks": sinks[0]} if sinks else {}
            out = dfa_megatron.dist_flash_attn_func(q, k, v, **self.options, **more)
        assert isinstance(out, torch.Tensor)
        if not out.requires_grad:
            return [out]
        with backward:
            return [out, *torch.autograd.grad(out, self.x, self.dout)]


def _drawn(rank: int, ranks: int, seed: int, kinds: list[int], **given: Any) -> None:
    draw = random.Random(seed)
    for kind in kinds:
        options = {**KINDS[kind], **given}
        case = Case(draw, rank, **options | ({} if ranks > 1 else {"layout": "contiguous"}))
        want = case.wanted()
        for call in range(5):
            under = drawn(draw, FORWARD), drawn(draw, STATES)
            found = case.run(*map(states, under))
            for name, x, y in zip(["out", "q", "k", "v", "sinks"], found, want, strict=False):
                assert_close(x, y, tolerance=1e-5, name=f"{name} of call {call} of {options} under {under}")


@pytest.mark.parametrize("seed", range(8))
def test_states_of_pytorch_change_no_number_of_a_recorded_run(seed: int) -> None:
    _drawn(0, 1, seed, list(range(len(KINDS))))


def _over_ranks(rank: int, ranks: int) -> None:
    _drawn(rank, ranks, 20, [0, 4])
    _drawn(rank, ranks, 21, [1], ulysses_degree=2)


def test_states_of_pytorch_change_no_number_over_ranks() -> None:
    run_ranks(2, _over_ranks, timeout=120)


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_autocast_rounds_no_replay(where: str) -> None:
    """Also where only a call that is replayed meets it."""
    draw = random.Random(5)
    for kind in range(len(KINDS)):
        case = Case(draw, 0, **{**KINDS[kind], "layout": "contiguous"})
        want = case.wanted()
        for call in range(6):
            on = call != 3
            under = [
                torch.autocast("cpu", torch.bfloat16, enabled=on and where in (name, "both"))
                for name in ("forward", "backward")
            ]
            for x, y in zip(case.run(*under), want, strict=True):
                assert_close(x, y, tolerance=1e-5)


def test_a_mode_sees_the_operations_of_a_backward_that_is_recorded() -> None:
    """The same in every call."""

    class Counts(Listens):
        seen = 0

        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            return super().__torch_dispatch__(*args, **kwargs)

    for known in in_use():  # of other tests
        known.bound.clear()
    case, seen = Case(random.Random(1), 0, kernel="reference"), []
    for _ in range(5):
        counts = Counts()
        case.run(nullcontext(), counts)
        case.run(nullcontext(), nullcontext())
        seen.append(counts.seen)
    assert len(set(seen)) == 1, seen
