"""Selective checkpointing keeps the operator's outputs, in eager mode and through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from dfa_megatron import remat

NAME = "dfa_remat_test::attention"
ran: list[str] = []


@torch.library.custom_op(NAME, mutates_args=())
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A stand-in with the signature of the real operator, which counts how often it runs."""
    ran.append(request)
    scores = q @ k.mT
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, request: str, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1])


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    p = (q @ k.mT - lse[..., None]).exp()
    ds = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True))
    return ds @ k, ds.mT @ q, p.mT @ dout, None, None


attention.register_autograd(backward, setup_context=keep)


@pytest.fixture(autouse=True)
def our_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat, "SAVED_OPERATORS", frozenset({NAME}))
    torch._dynamo.reset()


def gradients(context_fn: Callable[..., Any] | None, compiled: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients of two layers, each a region, and how often their attentions ran."""
    torch.manual_seed(3)
    qkv = torch.nn.Linear(8, 24, dtype=torch.float64)
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv(y.sin()).chunk(3, -1)
        return y + attention(q, k, v, "request", "group")[0].tanh()

    def model(y: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            y = checkpoint(layer, y, use_reentrant=False, context_fn=context_fn) if context_fn else layer(y)
        return y

    run = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else model
    ran.clear()
    run(x).square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in qkv.parameters())], len(ran)


def test_selective_checkpointing_runs_attention_once_with_the_same_bits() -> None:
    want, _ = gradients(None, compiled=False)
    got, runs = gradients(remat.selective_context_fn, compiled=False)
    assert runs == 2
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("context_fn", [remat.selective_context_fn, remat.context_fn])
@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="PyTorch 2.6 compiles with dispatch modes only there")
def test_a_compiled_region_runs_attention_once(context_fn: Callable[..., Any]) -> None:
    want, _ = gradients(None, compiled=False)
    got, runs = gradients(context_fn, compiled=True)
    assert runs == 2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_no_frame_is_seen_while_a_region_is_compiled() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if remat.active_frame() is None else x.cos()

    compiled = torch.compile(region, backend="eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    out = checkpoint(compiled, x, use_reentrant=False, context_fn=remat.context_fn)
    assert torch.equal(out, x.sin())


def test_the_policy_saves_our_operator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    save, other = torch.ops.dfa_remat_test.attention.default, torch.ops.aten.mm.default
    assert remat.selective_policy(None, save) == CheckpointPolicy.MUST_SAVE
    assert remat.selective_policy(None, other) == CheckpointPolicy.PREFER_RECOMPUTE
    monkeypatch.undo()
    assert frozenset({"dfa_megatron::attention"}) == remat.SAVED_OPERATORS
