"""The chunked functions that transformers' hybrid models call, distributed over ranks, against one process."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from dfa_megatron.recurrence import dist_mamba1, dist_mamba2, dist_scan, fla_scan
from dfa_megatron.testing.dense import assert_close
from dfa_megatron.testing.workers import run_ranks

RANKS, TOKENS = 3, 21  # no multiple of a chunk
DELTAS = {
    "qwen3_next": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
}


def function(model: str, name: str) -> Any:
    """Return the function of a model's module, if this transformers has it."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name, None) or pytest.skip(f"{model} has no {name} here")


def _case(model: str) -> tuple[Any, dict[str, torch.Tensor], Any, int]:
    """(distributed call, tokens, call of one process, dimension of the tokens); float32, which they compute in."""
    torch.manual_seed(1)
    length = RANKS * TOKENS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, *shape)

    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    if model in DELTAS:
        run = getattr(module, DELTAS[model])
        g = -0.1 * normal(2, *((8,) if model == "kimi_linear" else ())).abs()
        x = {"query": normal(2, 8), "key": normal(2, 8), "value": normal(2, 6), "g": g, "beta": normal(2).sigmoid()}
        options = {"chunk_size": 8, "use_qk_l2norm_in_kernel": True}
        scan = fla_scan(run, keys="key", values="value", packs=False, **options)
        return lambda t: dist_scan(scan, t)[0], x, lambda t: run(**t, **options)[0], 1
    if model == "mamba2":
        a, options = -torch.rand(4), {"chunk_size": 8, "D": torch.randn(4), "dt_bias": torch.randn(4)}
        options["dt_softplus"] = True
        x = {"x": normal(4, 5), "dt": normal(4), "B": normal(2, 6), "C": normal(2, 6)}
        run2 = module.mamba2_chunk_scan
        return (
            lambda t: dist_mamba2(run2, t, a, **options)[0],
            x,
            lambda t: run2(t["x"], t["dt"], a, t["B"], t["C"], **options),
            1,
        )
    a, options = -torch.rand(4, 3), {"D": torch.randn(4), "delta_bias": torch.randn(4), "delta_softplus": True}
    x = {name: normal(size).mT for name, size in {"x": 4, "dt": 4, "B": 3, "C": 3}.items()}
    run1 = module.mamba_selective_scan
    return (
        lambda t: dist_mamba1(run1, t, a, **options)[0],
        x,
        lambda t: run1(t["x"], t["dt"], a, t["B"], t["C"], **options),
        2,
    )


def _exact(rank: int, ranks: int, model: str) -> None:
    distributed, x, alone, dim = _case(model)
    whole = {name: t.clone().requires_grad_() for name, t in x.items()}
    mine = {name: t.narrow(dim, rank * TOKENS, TOKENS).clone().requires_grad_() for name, t in x.items()}
    wanted, out = alone(whole), distributed(mine)
    wanted.square().sum().backward()
    out.square().sum().backward()
    assert_close(out, wanted.narrow(dim, rank * TOKENS, TOKENS), tolerance=1e-5, name="out")
    for name, t in mine.items():
        assert t.grad is not None
        gradient = whole[name].grad
        assert gradient is not None
        assert_close(t.grad, gradient.narrow(dim, rank * TOKENS, TOKENS), tolerance=1e-4, name=name)


@pytest.mark.parametrize(
    ("model", "name"), [*DELTAS.items(), ("mamba2", "mamba2_chunk_scan"), ("jamba", "mamba_selective_scan")]
)
def test_a_function_of_transformers_is_exact_over_ranks(model: str, name: str) -> None:
    function(model, name)
    run_ranks(RANKS, _exact, model)
