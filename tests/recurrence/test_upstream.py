"""Kernels of other packages, by stand-ins with their interface: every gradient, packs, gates and step sizes.

Every option is exact over ranks, or refused by name before any kernel runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.layouts import of_lengths
from dfa_megatron.recurrence import dist_mamba1, dist_mamba2, dist_scan, fla_scan, local_scan, upstream
from dfa_megatron.recurrence.token_loop import delta_rule, linear_attention
from tests.support.arguments import assert_refused
from tests.support.close import assert_close
from tests.support.recurrences import by_path
from tests.support.state_kernels import chunk_gated_delta_rule
from tests.support.state_kernels import mamba_chunk_scan_combined as mamba2
from tests.support.workers import over_ranks

LENGTH, PACK, TREE = 12, (0, 1, 5, 6, 8, 9, 12), (-1, 0, 1, 0, 3, 0)

Named = dict[str, torch.Tensor]


def mamba1(
    u: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **o: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for `selective_scan_fn`; channels come before tokens."""
    dt = F.softplus(dt.mT + o["delta_bias"])
    q, k = (y.mT[:, :, None].expand(-1, -1, u.shape[1], -1) for y in (c, b))
    tokens = {"q": q, "k": k, "v": (u.mT * dt)[..., None], "g": dt[..., None] * a}
    out, state = linear_attention(tokens)
    return (out.squeeze(3) + o["D"] * u.mT).mT, state.squeeze(3)


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


KDA: dict[str, dict[str, Any]] = {
    "values first": {"state_v_first": True},
    "turned": {"transpose_state_layout": True, "scale": 0.7},
    "defaults": dict.fromkeys(("initial_state", "cu_seqlens", "cp_context"))
    | {"state_v_first": False, "output_final_state": False},
    "normalized": {
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "head_first": False,
    },
    "gated": {"use_gate_in_kernel": True, "A_log": torch.tensor([0.1, -0.3]), "dt_bias": torch.tensor(0.2)},
}  # fmt: skip
"""Options of FLA's `chunk_kda`."""


def own_of(kind: str) -> dict[str, Any]:
    """The options that the kernel itself takes."""
    return {name: x for name, x in KDA[kind].items() if name != "head_first"}


def drawn(kind: str) -> tuple[Named, Named, int]:
    """The tokens of a kind, its parameters, and the dimension of the tokens."""
    torch.manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, LENGTH, *shape, dtype=torch.float64)

    if kind in KDA:
        x = {"q": normal(2, 3), "k": 0.5 * normal(2, 3), "v": normal(2, 3 + len(kind) % 2)}  # states square, and not
        return {**x, "g": -normal(2, 3).abs(), "beta": normal(2).sigmoid()}, {}, 1
    if kind == "gated_delta":
        keys = F.normalize(normal(2, 3), dim=-1)
        tokens = {"q": normal(2, 3), "k": keys, "v": normal(2, 4), "g": -normal(2).abs(), "beta": normal(2).sigmoid()}
        return tokens, {}, 1
    heads = 4
    parameters = {
        "a": -torch.rand(*((heads,) if kind == "mamba2" else (heads, 3)), dtype=torch.float64),
        "D": torch.randn(heads).double(),
        "dt_bias": torch.randn(heads).double() - 1,
    }
    if kind == "mamba2":
        tokens = {"x": normal(heads, 3), "dt": normal(heads), "B": normal(2, 5), "C": normal(2, 5)}
        return {**tokens, "z": normal(heads, 3)}, parameters, 1
    tokens = {"x": normal(heads), "dt": normal(heads), "B": normal(3), "C": normal(3), "z": normal(heads)}
    return {name: x.mT for name, x in tokens.items()}, parameters, 2


def called(kind: str, tokens: Named, p: Named, where: dict[str, Any], packs: bool) -> Any:
    """Return (out, final state) of one kind over the ranks there are."""
    tokens = dict(tokens)
    if kind in KDA:
        scan = fla_scan(partial(kda, **KDA[kind])) if packs else fla_scan(kda, **KDA[kind])
        return dist_scan(scan, tokens, **where)
    if kind == "gated_delta":
        return dist_scan(fla_scan(chunk_gated_delta_rule, packs=packs, scale=0.6), tokens, **where)
    options: dict[str, Any] = {"z": tokens.pop("z"), "D": p["D"]}
    if kind == "mamba1":
        options |= {"delta_bias": p["dt_bias"], "delta_softplus": True}
        return dist_mamba1(mamba1, tokens, p["a"], **where, **options)
    options |= {"dt_bias": p["dt_bias"], "dt_softplus": True, "dt_limit": (0.1, 0.9), "chunk_size": 4}
    return dist_mamba2(mamba2, tokens, p["a"], packs=packs, **where, **options)


def graded(call: Callable[[Named, Named], torch.Tensor], tokens: Named, p: Named) -> tuple[torch.Tensor, Named]:
    """Run with a fixed gradient of the output; return (out, gradient by name)."""
    leaves = {n: x.clone().requires_grad_() for n, x in (tokens | p).items()}
    out = call({n: leaves[n] for n in tokens}, {n: leaves[n] for n in p})
    (out * out).sum().backward()
    return out.detach(), {n: x.grad for n, x in leaves.items() if x.grad is not None}


@over_ranks(3)
def test_kernels_of_other_packages_are_exact_over_ranks_with_their_parameters(rank: int, ranks: int) -> None:
    for kind in ("mamba2", "mamba1", "gated_delta", *KDA):
        exact(kind, rank, ranks)


def exact(kind: str, rank: int, ranks: int) -> None:
    local_scan._CHUNK = 64  # several chunks of a few tokens
    tokens, p, dim = drawn(kind)
    packs = ({"cu_seqlens": PACK}, {"cu_seqlens": PACK, "parents": TREE})
    cases: Any = (({}, False), ({}, False), *itertools.product(packs, (True, False)))
    for number, (where, packed) in enumerate(cases):
        counts = ((4, 4, 4), (7, 0, 5))[number % 2]
        lo, size = sum(counts[:rank]), counts[rank]
        mine = {n: x.narrow(dim, lo, size) for n, x in tokens.items()}
        where = where | {"layout": of_lengths(counts)}
        path = where.get("cu_seqlens", (0, LENGTH)), where.get("parents", ()), dim

        def whole(x: Named, p: Named, path: Any = path) -> torch.Tensor:
            return by_path(lambda one: _alone(kind, one, p), x, *path)

        wanted, gradients = graded(whole, tokens, p)
        out, got = graded(lambda x, p, o=where, k=packed: called(kind, x, p, o, k)[0], mine, p)  # type: ignore[misc]
        assert_close(out, wanted.narrow(dim, lo, size), tolerance=1e-11, name="out")
        if kind in KDA and "parents" not in where:  # its states have the keys first, whatever the kernel's have
            final = kda(**{n: x[:, path[0][-2] :] for n, x in tokens.items()}, **own_of(kind))[1]
            turned = KDA[kind].get("state_v_first") or KDA[kind].get("transpose_state_layout")
            state = called(kind, mine, p, where, packed)[1]
            assert rank < ranks - 1 or torch.allclose(state, final.mT if turned else final, atol=1e-11, rtol=1e-11)
        for name, gradient in got.items():
            if name in p:
                torch.distributed.all_reduce(gradient)
                assert_close(gradient, gradients[name], tolerance=1e-10, name=name)
            else:
                assert_close(gradient, gradients[name].narrow(dim, lo, size), tolerance=1e-10, name=name)


def _alone(kind: str, x: Named, p: Named) -> torch.Tensor:
    """One document in one process, by the stand-ins alone."""
    if kind in KDA:
        return kda(**x, **own_of(kind))[0]
    if kind == "gated_delta":
        return chunk_gated_delta_rule(**x, scale=0.6)[0]
    given = (x["x"], x["dt"], p["a"], x["B"], x["C"])
    if kind == "mamba2":
        more = {"D": p["D"], "dt_bias": p["dt_bias"], "dt_limit": (0.1, 0.9)}
        out: torch.Tensor = mamba2(*given, 4, z=x["z"], **more)
        return out
    return mamba1(*given, D=p["D"], delta_bias=p["dt_bias"])[0] * F.silu(x["z"])


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
    upstream.drops_gradient = lambda function: True
    assert_refused("drops the gradient of the last state", dist_mamba1, _unknown, MAMBA, X)
