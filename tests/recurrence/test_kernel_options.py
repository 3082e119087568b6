"""Every option of the wrapped kernels: exact over ranks, or refused by name before any of them runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.recurrence import dist_mamba1, dist_mamba2, dist_scan, fla_scan, upstream
from dfa_megatron.recurrence.token_loop import delta_rule
from tests.support.close import assert_close
from tests.support.workers import over_ranks

LENGTH, PACK = 9, (0, 1, 5, 9)


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_context: object = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for FLA's `chunk_kda`."""
    turned = more.pop("transpose_state_layout", state_v_first)
    a_log, dt_bias, scale = (more.pop(name, None) for name in ("A_log", "dt_bias", "scale"))
    norm, gate, sigmoid = (more.pop(f"use_{name}_in_kernel", False) for name in ("qk_l2norm", "gate", "beta_sigmoid"))
    g, beta = more.pop("g"), more.pop("beta")
    more.pop("output_final_state", None)
    assert not more, more
    assert cp_context is None
    if norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g = -a_log.exp()[:, None] * F.softplus(g + dt_bias) if gate else g
    beta = beta.sigmoid() if sigmoid else beta
    x = {"q": q * (k.shape[-1] ** -0.5 if scale is None else scale), "k": k, "v": v, "g": g, "beta": beta}
    state = initial_state.mT if turned and initial_state is not None else initial_state
    out, final = delta_rule(x, state, () if cu_seqlens is None else tuple(cu_seqlens.tolist()))
    return out, final.mT if turned else final


def linear(q: Any, k: Any, v: Any, normalize: bool = True, **_: Any) -> Any:
    """Stand in for a function whose own default cannot be served."""


def _tokens(values: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    x = {
        name: torch.randn(1, LENGTH, 2, size, dtype=torch.float64)
        for name, size in {"q": 3, "k": 3, "v": values, "g": 3}.items()
    }
    return {**x, "g": -x["g"].abs(), "k": 0.5 * x["k"], "beta": torch.rand(1, LENGTH, 2, dtype=torch.float64)}


OPTIONS: list[dict[str, Any]] = [
    {"state_v_first": True},
    {"transpose_state_layout": True, "scale": 0.7},
    {
        "state_v_first": False,
        "initial_state": None,
        "cu_seqlens": None,
        "cp_context": None,
        "output_final_state": False,
    },
    {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "head_first": False},
    {"use_gate_in_kernel": True, "A_log": torch.tensor([0.1, -0.3]), "dt_bias": torch.tensor(0.2)},
]


@over_ranks(3)
def test_every_known_option_is_exact_over_ranks(rank: int, ranks: int) -> None:
    for number, options in enumerate(OPTIONS):
        for offsets in (None, PACK):
            tokens = _tokens(3 if number % 2 else 4)  # states that are square, and not
            whole = {name: x.clone().requires_grad_() for name, x in tokens.items()}
            own = {name: x for name, x in options.items() if name not in ("head_first", "output_final_state")}
            cu_seqlens = None if offsets is None else torch.tensor(offsets)
            want, final = kda(**whole, **own | {"cu_seqlens": cu_seqlens})
            final = final.mT if own.get("state_v_first") or own.get("transpose_state_layout") else final
            rows = slice(rank * LENGTH // ranks, (rank + 1) * LENGTH // ranks)
            mine = {name: x[:, rows].clone().requires_grad_() for name, x in tokens.items()}
            scan = fla_scan(partial(kda, **options)) if number % 2 else fla_scan(kda, **options)
            out, state = dist_scan(scan, mine, cu_seqlens=offsets)
            assert_close(out, want[:, rows], tolerance=1e-11)
            if rank == ranks - 1:
                assert_close(state, final[-1:], tolerance=1e-11)
            (want * want).sum().backward()
            (out * out).sum().backward()
            for name, x in mine.items():
                assert x.grad is not None
                assert whole[name].grad is not None
                assert_close(x.grad, whole[name].grad[:, rows], tolerance=1e-10, name=f"{name} with {options}")  # type: ignore[index]


def _unknown(*_: Any, **__: Any) -> Any:
    raise AssertionError("a refused call runs no kernel")


X = torch.zeros(1, 4, 2, 3)
MAMBA = {"x": X, "dt": X[..., 0], "B": X, "C": X}
REFUSED: dict[str, Callable[[], object]] = {
    "initial_state": lambda: fla_scan(_unknown, initial_state=X),
    "cu_seqlens": lambda: fla_scan(_unknown, cu_seqlens=torch.tensor([0, 4])),
    "cu_seqlens_cpu": lambda: fla_scan(_unknown, cu_seqlens_cpu=torch.tensor([0, 4])),
    "chunk_indices": lambda: fla_scan(_unknown, chunk_indices=X),
    "cp_context": lambda: fla_scan(_unknown, cp_context=object()),
    "head_first": lambda: fla_scan(_unknown, head_first=True),
    "return_intermediate_states": lambda: fla_scan(_unknown, return_intermediate_states=True),
    "normalize": lambda: fla_scan(linear),
    "'chunk_sise'.*perhaps 'chunk_size'": lambda: fla_scan(_unknown, chunk_sise=64),
    "'beta'.*tokens are given by name": lambda: fla_scan(partial(_unknown, beta=X)),
    "seq_idx": lambda: dist_mamba2(_unknown, MAMBA, X, chunk_size=4, seq_idx=X),
    "initial_states": lambda: dist_mamba2(_unknown, MAMBA, X, initial_states=X),
    "return_varlen_states": lambda: dist_mamba2(_unknown, MAMBA, X, return_varlen_states=True),
    "'headdim'": lambda: dist_mamba2(_unknown, MAMBA, X, headdim=3),
    "'dt_bias'": lambda: dist_mamba1(_unknown, MAMBA, X, dt_bias=X),
}


@pytest.mark.parametrize("match", REFUSED)
def test_an_option_that_ranks_cannot_serve_is_refused_by_name(match: str) -> None:
    with pytest.raises(UnsupportedError, match=match):
        REFUSED[match]()


@over_ranks(2)
def test_a_kernel_without_the_gradient_of_its_state_does_not_train_over_ranks(rank: int, ranks: int) -> None:
    upstream._drops_gradient = lambda function: True
    with pytest.raises(UnsupportedError, match="drops the gradient of the last state"):
        dist_mamba1(_unknown, MAMBA, X)
