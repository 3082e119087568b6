"""What a first call in inference mode leaves behind, such as tables of documents, serves training afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import masks
from dfa_megatron.recurrence import dist_mamba2, dist_scan, fla_scan
from dfa_megatron.recurrence.token_loop import linear_attention
from tests.support.arguments import arguments
from tests.support.recurrences import recurrence


class Saving(torch.autograd.Function):
    """Passes x on and saves the table for its backward, as kernels of other packages do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert ctx.saved_tensors
        return gradient, None


PACK = (0, 5, 12)


def chunked(initial_state: Any, output_final_state: bool, cu_seqlens: Any = None, **x: torch.Tensor) -> Any:
    out, state = linear_attention(x, initial_state, () if cu_seqlens is None else tuple(cu_seqlens.tolist()))
    return Saving.apply(out, cu_seqlens), state


def mamba(x: Any, dt: Any, a: Any, b: Any, c: Any, *, seq_idx: Any, **_: Any) -> Any:
    out, states = linear_attention({"q": c, "k": b, "v": x * dt[..., None], "g": dt * a}, None, PACK)
    return Saving.apply(out, seq_idx), states.mT


def scan() -> torch.Tensor:
    drawn = recurrence("mamba2", 12, seed=1, packs=True)
    return dist_scan(fla_scan(chunked), drawn.rows(0, 1), cu_seqlens=PACK)[0]


def scan_mamba() -> torch.Tensor:
    x = recurrence("mamba2", 12, seed=1, packs=True).rows(0, 1)
    tokens = {"x": x["v"], "dt": x["g"].abs(), "B": x["k"], "C": x["q"]}
    return dist_mamba2(mamba, tokens, -torch.rand(2, dtype=torch.float64), packs=True, cu_seqlens=PACK)[0]


def attend(**options: Any) -> torch.Tensor:
    q, k, v = (torch.randn(1, 12, 2, 8, requires_grad=True) for _ in range(3))
    out = dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(**options))
    assert isinstance(out, torch.Tensor)
    return out


def packed() -> torch.Tensor:
    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    out = dfa_megatron.dist_flash_attn_varlen_func(q, k, v, torch.tensor(PACK, dtype=torch.int32), causal=True)
    assert isinstance(out, torch.Tensor)
    return out


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "fla_scan": scan,
    "dist_mamba2": scan_mamba,
    "attention": attend,
    "pack": packed,
    "mask": lambda: attend(mask=masks.prefix_lm(12, 5), kernel="reference"),
    "sinks": lambda: attend(sinks=torch.zeros(2, requires_grad=True), kernel="reference"),
}


@pytest.mark.parametrize("name", CALLS)
def test_training_follows_evaluation_in_inference_mode(name: str) -> None:
    for _ in range(3):
        with torch.inference_mode():
            CALLS[name]()
        CALLS[name]().sum().backward()
