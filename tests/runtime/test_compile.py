"""The operator under torch.compile and selective checkpointing."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.runtime import prepare
from dfa_megatron.runtime.counters import COUNTERS
from tests.support.arguments import arguments
from tests.support.attend import case
from tests.support.workers import over_ranks

CONFIGS = {name: DistAttentionConfig(schedule=name) for name in ("ring", "balanced")}
"""Made outside of regions that are compiled."""


class Layer(torch.nn.Module):
    """Two attentions with sinks of their own, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.sinks = torch.nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for sinks, schedule in zip(self.sinks, ("ring", "balanced"), strict=True):
            q, k, v = (part.unflatten(-1, (2, 8)) for part in self.qkv(x).chunk(3, -1))
            x = x + dfa_megatron.dist_flash_attn_func(
                q, k, v, causal=True, sinks=sinks, config=CONFIGS[schedule]
            ).flatten(-2)
        return x


@pytest.mark.support("runtime", "`torch.compile`")
@over_ranks(2, timeout=120)
def test_every_checkpoint_and_the_compiler_give_the_same_gradients_without_a_break(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    layer = Layer()
    selective = partial(checkpoint, layer, use_reentrant=False, context_fn=remat.selective_context_fn)
    frames = partial(checkpoint, layer, use_reentrant=False, context_fn=remat.context_fn)
    ways = {
        "plain": layer,
        "full": partial(checkpoint, layer, use_reentrant=False),
        "frames": frames,
        "re-entrant": partial(remat.remat_checkpoint, layer),
        "selective": selective,
        "compiled": torch.compile(layer, backend="aot_eager", fullgraph=True),
        # The policy keeps (out, lse) under the compiler, too.
        "compiled, selective": torch.compile(lambda x: selective(x), backend="aot_eager", fullgraph=True),
    }
    if not torch.__version__.startswith("2.6."):  # which compiles with dispatch modes only there
        partitioned: Any = {"backend": "aot_eager_decomp_partition", "fullgraph": True}
        ways |= {"compiled, frames": torch.compile(lambda x: frames(x), **partitioned)}
        ways |= {"partitioned, selective": torch.compile(lambda x: selective(x), **partitioned)}
    torch.manual_seed(1 + rank)
    x = torch.randn(2, 6, 16, dtype=torch.float64, requires_grad=True)
    want: list[torch.Tensor] = []
    for name, way in ways.items():
        layer.zero_grad()
        x.grad = None
        COUNTERS.reset()
        prepare._SAID.clear()
        for prepared in prepare.in_use():
            prepared.said.clear()
        with contextlib.redirect_stderr(io.StringIO()) as said:
            way(x).square().sum().backward()
        if name == "compiled" and rank == 0:
            lines = [f"dfa: 2 ranks, contiguous, {schedule}, cpu over gloo" for schedule in CONFIGS]
            assert said.getvalue().splitlines() == lines
        got = [x.grad, layer.sinks.grad, *(p.grad for p in layer.qkv.parameters())]
        want = want or [g.clone() for g in got]
        for mine, plain in zip(got, want, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-10, msg=name)
        assert COUNTERS.attention_forwards == (4 if name == "full" else 2), name
    assert want[1].abs().min() > 0


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


@over_ranks(2, timeout=120)
def test_a_wrong_value_is_refused_where_a_graph_runs_and_told_to_the_others(rank: int, ranks: int) -> None:
    run = torch.compile(lambda x, causal: dfa_megatron.dist_flash_attn_func(x, x, x, causal=causal), backend="eager")
    with pytest.raises(UnsupportedError if rank else DisagreementError, match="causal=1: it must be of type bool"):
        run(torch.randn(1, 4, 2, 8), 1 if rank else True)


def test_the_operator_passes_the_checks_of_torch_library() -> None:
    from dfa_megatron.runtime.op import attention
    from dfa_megatron.runtime.request import Request

    whole = case(12)
    q, k, v = (x.requires_grad_() for x in whole.inputs)
    text = Request(**arguments(softmax_scale=0.25, kernel="reference")).to_text()
    torch.library.opcheck(attention, (q, k, v, None, text, ""))
    sinks = torch.randn(q.shape[2], dtype=torch.float32, requires_grad=True)
    torch.library.opcheck(attention, (q, k, v, sinks, text, ""))
