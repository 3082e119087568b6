"""The operator under torch.compile and selective checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.arguments import arguments
from tests.support.attend import case
from tests.support.workers import run_ranks

CONFIGS = {name: DistAttentionConfig(schedule=name) for name in ("ring", "balanced")}
"""Made outside of regions that are compiled."""


class Layer(torch.nn.Module):
    """Projections and dropout around two attentions, in float64."""

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=torch.float64)
        self.out = torch.nn.Linear(width, width, dtype=torch.float64)

    def attend(self, x: torch.Tensor, schedule: str) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        return dfa_megatron.dist_flash_attn_func(q, k, v, causal=True, config=CONFIGS[schedule]).flatten(-2)

    def forward(self, x: torch.Tensor, dropout: float = 0.0) -> torch.Tensor:
        for schedule in ("balanced", "ring"):
            x = x + self.out(torch.nn.functional.dropout(self.attend(x, schedule), dropout))
        return x


def _model_and_input(rank: int) -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    layer = Layer()
    torch.manual_seed(1 + rank)
    return layer, torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)


def _run(run: object, layer: Layer, x: torch.Tensor) -> tuple[list[torch.Tensor], dict[str, int]]:
    layer.zero_grad()
    x.grad = None
    torch.manual_seed(7)
    COUNTERS.reset()
    y = run(x)  # type: ignore[operator]
    y.square().sum().backward()
    return [y.detach(), x.grad.clone(), *(p.grad.clone() for p in layer.parameters())], COUNTERS.snapshot()


def _compiled(rank: int, ranks: int, backend: str) -> None:
    layer, x = _model_and_input(rank)
    plain, counts = _run(layer, layer, x)
    compiled, again = _run(torch.compile(layer, backend=backend, fullgraph=True), layer, x)
    assert again["attention_forwards"] == counts["attention_forwards"]
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, context_fn=remat.selective_context_fn)

    got, once = _run(torch.compile(checkpointed, backend=backend, fullgraph=True), layer, x)
    assert once["attention_forwards"] == counts["attention_forwards"], (
        "the policy keeps (out, lse) under the compiler, too"
    )
    for a, b in zip(got, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.support("runtime", "`torch.compile`")
def test_compilers_trace_through_the_operator_without_a_break() -> None:
    run_ranks(2, _compiled, "aot_eager", timeout=120)


class TrialTensors(torch.nn.Module):
    """An attention whose numbers are attributes, as layers of one class have different ones."""

    def __init__(self, window: tuple[int, int], scale: float | None, softcap: float) -> None:
        super().__init__()
        self.window, self.scale, self.softcap = window, scale, softcap

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attended(q, k, v, self.window, self.scale, self.softcap)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Any, scale: Any, cap: Any) -> torch.Tensor:
    out = dfa_megatron.dist_flash_attn_func(
        q, k, v, causal=True, window_size=window, softmax_scale=scale, softcap=cap, config=CONFIGS["ring"]
    )
    assert isinstance(out, torch.Tensor)
    return out


NUMBERS: list[tuple[Any, ...]] = [((4, 0), 0.5, 0.0), ((-1, -1), None, 2.0), ([2, 0], 1, 3), ((4, 1), 0.125, 2.5)]


@pytest.mark.parametrize(("by", "dynamic"), [("attribute", None), ("argument", True)])
def test_numbers_and_shapes_that_change_are_compiled_without_a_break(by: str, dynamic: bool | None) -> None:
    torch.compiler.reset()
    options: Any = {"backend": "aot_eager", "fullgraph": True, "dynamic": dynamic}
    function = torch.compile(_attended, **options)
    for draw, numbers in enumerate(NUMBERS):
        dim = 8 << draw % 3
        x = [torch.randn(1, 6 + 2 * draw, 2, dim, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        wanted = _attended(*x, *numbers)
        if by == "argument":
            found = function(*x, *numbers)
        else:
            layer = TrialTensors(*numbers)
            layer.compile(**options)
            found = layer(*x)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        for one, other in zip(
            torch.autograd.grad(found.sin().sum(), x), torch.autograd.grad(wanted.sin().sum(), x), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_the_operator_passes_the_checks_of_torch_library() -> None:
    from dfa_megatron.runtime.op import attention
    from dfa_megatron.runtime.request import Request

    whole = case(12)
    q, k, v = (x.requires_grad_() for x in whole.inputs)
    text = Request(**arguments(softmax_scale=0.25, kernel="reference")).to_text()
    torch.library.opcheck(attention, (q, k, v, None, None, text, ""))
    sinks = torch.randn(q.shape[2], dtype=torch.float32, requires_grad=True)
    torch.library.opcheck(attention, (q, k, v, sinks, None, text, ""))
    text = Request(**arguments(softmax_scale=0.25, kernel="reference", alibi=True)).to_text()
    torch.library.opcheck(attention, (q, k, v, sinks, torch.rand(q.shape[2]), text, ""))
