"""Kernels of other packages, by stand-ins with their interface: every gradient, packs, gates and step sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dfa_megatron.layouts import of_lengths
from dfa_megatron.recurrence import dist_mamba1, dist_mamba2, dist_scan, fla_scan, local_scan
from dfa_megatron.recurrence.token_loop import delta_rule, linear_attention
from tests.support.close import assert_close
from tests.support.recurrences import by_path
from tests.support.workers import over_ranks

LENGTH, PACK, TREE = 12, (0, 1, 5, 6, 8, 9, 12), (-1, 0, 1, 0, 3, 0)

Named = dict[str, torch.Tensor]


def mamba2(
    x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **o: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for `mamba_chunk_scan_combined`; the state is (batch, heads, head_dim, states)."""
    dt = F.softplus(dt + o["dt_bias"]).clamp(*o["dt_limit"])
    q, k = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (c, b))
    numbers = o["seq_idx"][0].tolist() if o.get("seq_idx") is not None else [0] * x.shape[1]
    cuts = (0, *(t for t in range(1, len(numbers)) if numbers[t] != numbers[t - 1]), len(numbers))
    tokens = {"q": q, "k": k, "v": x * dt[..., None], "g": dt * a}
    out, states = linear_attention(tokens, None, cuts if len(cuts) > 2 else ())
    return out + o["D"][:, None] * x, states[-1:].mT if len(cuts) > 2 else states.mT


def mamba1(
    u: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, **o: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for `selective_scan_fn`; channels come before tokens."""
    dt = F.softplus(dt.mT + o["delta_bias"])
    q, k = (y.mT[:, :, None].expand(-1, -1, u.shape[1], -1) for y in (c, b))
    tokens = {"q": q, "k": k, "v": (u.mT * dt)[..., None], "g": dt[..., None] * a}
    out, state = linear_attention(tokens)
    return (out.squeeze(3) + o["D"] * u.mT).mT, state.squeeze(3)


def gated_delta(cu_seqlens: torch.Tensor | None = None, *, scale: float, **x: Any) -> Any:
    """Stand in for `chunk_gated_delta_rule`."""
    assert x.pop("output_final_state")
    state = x.pop("initial_state")
    out, final = delta_rule({**x, "q": x["q"] * scale}, state, () if cu_seqlens is None else tuple(cu_seqlens.tolist()))
    return out, final


def drawn(kind: str) -> tuple[Named, Named, int]:
    """The tokens of a kind, its parameters, and the dimension of the tokens."""
    torch.manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, LENGTH, *shape, dtype=torch.float64)

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


def called(kind: str, tokens: Named, p: Named, where: dict[str, Any], packs: bool) -> torch.Tensor:
    """Run one kind over the ranks there are."""
    tokens = dict(tokens)
    if kind == "gated_delta":
        return dist_scan(fla_scan(gated_delta, packs=packs, scale=0.6), tokens, **where)[0]
    options: dict[str, Any] = {"z": tokens.pop("z"), "D": p["D"]}
    if kind == "mamba1":
        options |= {"delta_bias": p["dt_bias"], "delta_softplus": True}
        return dist_mamba1(mamba1, tokens, p["a"], **where, **options)[0]
    options |= {"dt_bias": p["dt_bias"], "dt_softplus": True, "dt_limit": (0.1, 0.9), "chunk_size": 4}
    return dist_mamba2(mamba2, tokens, p["a"], packs=packs, **where, **options)[0]


def graded(call: Callable[[Named, Named], torch.Tensor], tokens: Named, p: Named) -> tuple[torch.Tensor, Named]:
    """Run with a fixed gradient of the output; return (out, gradient by name)."""
    leaves = {n: x.clone().requires_grad_() for n, x in (tokens | p).items()}
    out = call({n: leaves[n] for n in tokens}, {n: leaves[n] for n in p})
    (out * out).sum().backward()
    return out.detach(), {n: x.grad for n, x in leaves.items() if x.grad is not None}


@over_ranks(3)
def test_kernels_of_other_packages_are_exact_over_ranks_with_their_parameters(rank: int, ranks: int) -> None:
    for kind in ("mamba2", "mamba1", "gated_delta"):
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
        out, got = graded(lambda x, p, o=where, k=packed: called(kind, x, p, o, k), mine, p)  # type: ignore[misc]
        assert_close(out, wanted.narrow(dim, lo, size), tolerance=1e-11, name="out")
        for name, gradient in got.items():
            if name in p:
                torch.distributed.all_reduce(gradient)
                assert_close(gradient, gradients[name], tolerance=1e-10, name=name)
            else:
                assert_close(gradient, gradients[name].narrow(dim, lo, size), tolerance=1e-10, name=name)


def _alone(kind: str, x: Named, p: Named) -> torch.Tensor:
    """One document in one process, by the stand-ins alone."""
    if kind == "gated_delta":
        out: torch.Tensor = gated_delta(**x, initial_state=None, output_final_state=True, scale=0.6)[0]
        return out
    given = (x["x"], x["dt"], p["a"], x["B"], x["C"])
    if kind == "mamba2":
        return mamba2(*given, D=p["D"], dt_bias=p["dt_bias"], dt_limit=(0.1, 0.9))[0] * F.silu(x["z"])
    return mamba1(*given, D=p["D"], delta_bias=p["dt_bias"])[0] * F.silu(x["z"])
