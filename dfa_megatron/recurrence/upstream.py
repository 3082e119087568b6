"""Kernels of other packages by their state interface: flash-linear-attention, mamba-ssm, and functions like theirs.

Their options are known by name and passed on, or refused before a rank runs one.

Nothing is imported here: the caller hands over the function that its layer calls, as transformers and Megatron name it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import accumulator_dtype
from dfa_megatron.names import nearest
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.recurrence.functions import dist_scan
from dfa_megatron.recurrence.local_scan import Decay, Scan, Tokens
from dfa_megatron.runtime.comm.compared import together
from dfa_megatron.runtime.comm.groups import Group, group_size
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets
from dfa_megatron.runtime.request import DEFAULTS

Given = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a family of kernels.

    passed: change what one token does, or how a kernel computes; linear in (state, values) all the same.
    ours: are given by the functions here, whatever the caller gives.
    refused: option -> why, and what works. Values that are None or False ask for nothing.
    """

    passed: frozenset[str]
    ours: frozenset[str]
    refused: Mapping[str, tuple[str, str]]

    def of(self, function: Callable[..., Any], given: Given) -> tuple[Callable[..., Any], Given]:
        """Return the kernel without the `functools.partial`s around it, and the options to call it with.

        Raises:
            UnsupportedError: names the option that is unknown or cannot be served.
        """
        while isinstance(inner := function, functools.partial) and not inner.args:
            function, given = inner.func, inner.keywords | given
        takes = _parameters(function)
        for name, value in ({name: takes[name] for name in self.refused if takes.get(name)} | given).items():
            if name in self.refused:
                if value is not None and value is not False:
                    raise UnsupportedError(f"{name} of {_named(function)}", *self.refused[name])
            elif name not in self.passed | self.ours:
                why = "what it does over ranks is not known; tokens are given by name beside the options"
                raise UnsupportedError(
                    f"option {name!r} of {_named(function)}", why, nearest(name, sorted(self.passed))
                )
        kept = self.passed | (self.refused.keys() & takes.keys())
        return function, {name: value for name, value in given.items() if name in kept}


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters that a function names, with their defaults, None for none."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {each.name: None if each.default is each.empty else each.default for each in found}


def _named(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


_STATE = "states come from the ranks before, and a sequence begins with zero", "sequences that begin with no state"
_DOCUMENTS = "a rank's kernel is called with its own tokens' documents", "cu_seqlens= of the whole sequence"
_FEW = "only (out, final state) are distributed", "the kernel's two results"

_TOKEN_WISE = (
    "scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval",
    "safe_gate", "lower_bound", "A_log", "dt_bias", "g_gamma", "u", "layer_idx", "num_layers", "chunk_size",
    "disable_recompute",
)  # fmt: skip

FLA = Options(
    passed=frozenset(_TOKEN_WISE),
    # The states are (batch, heads, keys, values) to all of us, so a kernel is not asked to turn them.
    ours=frozenset({"output_final_state", "state_v_first", "transpose_state_layout"}),
    refused={
        "initial_state": _STATE,
        "cu_seqlens": _DOCUMENTS,
        "cu_seqlens_cpu": _DOCUMENTS,
        "chunk_indices": _DOCUMENTS,
        "cp_context": ("the ranks are those of `dist_scan`", "group= of dist_scan"),
        "head_first": ("tokens lie along dimension 1", "tensors (batch, tokens, heads, ...)"),
        "return_intermediate_states": _FEW,
        "normalize": ("its sum over earlier tokens does not travel", "normalize=False"),
    },
)

MAMBA2 = Options(
    passed=frozenset({"chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit", "state_dtype"}),
    ours=frozenset({"return_final_states"}),
    refused={"initial_states": _STATE, "seq_idx": _DOCUMENTS, "cu_seqlens": _DOCUMENTS, "return_varlen_states": _FEW},
)

MAMBA1 = Options(
    passed=frozenset({"D", "delta_bias", "delta_softplus", "use_mambapy", "use_associative_scan"}),
    ours=frozenset({"return_last_state"}),
    refused={},
)


def fla_scan(
    function: Callable[..., Any], *, keys: str = "k", values: str = "v", packs: bool = True, **options: Any
) -> Scan:
    """Return the `Scan` of a function with the interface of flash-linear-attention.

    Args:
        function: takes tokens by name, initial_state, output_final_state and cu_seqlens, and returns (out, state):
            `chunk_gated_delta_rule`, `chunk_kda`, `chunk_delta_rule`, `chunk_gla`, `chunk_simple_gla` of fla.ops, and
            the chunked functions that transformers brings.
        keys, values: its names of them: "key" and "value" in transformers.
        packs: whether it obeys cu_seqlens; functions of transformers do not.
        options: passed on if known, such as scale and use_qk_l2norm_in_kernel. With state_v_first, too, states are
            (batch, heads, keys, values).

    Raises:
        UnsupportedError: an option is unknown, or cannot be served over ranks.
    """
    function, options = FLA.of(function, options)

    def run(x: dict[str, torch.Tensor], state: torch.Tensor | None, documents: Offsets) -> Any:
        offsets = {"cu_seqlens": _offsets(documents, x[values].device)} if documents else {}
        return function(**options | x | {"initial_state": state, "output_final_state": True} | offsets)

    return Scan(run, keys, values, packs)


@together
def dist_mamba2(
    function: Callable[..., Any],
    tokens: Tokens,
    a: torch.Tensor,
    *,
    packs: bool = False,
    group: Group = None,
    cu_seqlens: CuSeqlens = None,
    parents: Sequence[int] | None = None,
    layout: Layout | str = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final state) of Mamba-2 over contiguous tokens; collective, see `dist_scan`.

    Args:
        function: `mamba_chunk_scan_combined` of mamba-ssm, or transformers' `mamba2_chunk_scan`.
        tokens: x (batch, tokens, heads, head_dim), dt (batch, tokens, heads), B and C (batch, tokens, groups, states).
        a: its A, (heads,), negative.
        packs: whether it obeys seq_idx; transformers' does not.
        options: passed on: chunk_size, D, dt_bias, dt_softplus, dt_limit, state_dtype; z is applied after the exchange.

    Returns:
        out like x, and the state (batch, heads, head_dim, states), as the function has it.

    Raises:
        UnsupportedError: as `dist_scan`, and for any other option.
    """
    z = options.pop("z", None)
    function, options = MAMBA2.of(function, options)

    def run(x: dict[str, torch.Tensor], state: torch.Tensor | None, documents: Offsets) -> Any:
        more = {"seq_idx": _numbers(documents, x["dt"].device)} if documents else {}
        given = (x["x"], x["dt"], a, x["B"], x["C"])
        out, final = function(*given, **options | more | {"return_final_states": True})
        return out, final.mT

    dt = _step(tokens["dt"], options.get("dt_bias"), bool(options.get("dt_softplus")))
    dt = dt.clamp(*options.get("dt_limit", (0.0, float("inf"))))
    decay = Decay(tokens["C"], dt, a[:, None])
    where: Given = {"group": group, "cu_seqlens": cu_seqlens, "parents": parents, "layout": layout, "config": config}
    out, final = dist_scan(Scan(run, "B", "x", packs, one_state=True), tokens, decay=decay, **where)
    return out if z is None else out * F.silu(z), final.mT


@together
def dist_mamba1(
    function: Callable[..., Any],
    tokens: Tokens,
    a: torch.Tensor,
    *,
    group: Group = None,
    cu_seqlens: CuSeqlens = None,
    parents: Sequence[int] | None = None,
    layout: Layout | str = "contiguous",
    config: DistAttentionConfig = DEFAULTS,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final state) of Mamba-1's selective scan over contiguous tokens; collective, see `dist_scan`.

    Args:
        function: `selective_scan_fn` of mamba-ssm, or transformers' `mamba_selective_scan`.
        tokens: x and dt (batch, channels, tokens), B and C (batch, states, tokens).
        a: its A, (channels, states), negative.
        options: passed on: D, delta_bias, delta_softplus; z is applied after the exchange.

    Returns:
        out like x, and the state (batch, channels, states).

    Raises:
        UnsupportedError: as `dist_scan`, for any other option, and for gradients through mamba-ssm's, whose backward
            has none of the last state.
    """
    z = options.pop("z", None)
    function, options = MAMBA1.of(function, options)
    if drops_gradient(function) and torch.is_grad_enabled() and group_size(group) > 1:
        why = "its backward drops the gradient of the last state, which goes on to the next rank"
        instead = "transformers' mamba_selective_scan"
        raise UnsupportedError("training through mamba-ssm's selective_scan_fn over ranks", why, instead)

    def run(x: dict[str, torch.Tensor], state: torch.Tensor | None, documents: Offsets) -> Any:
        b, c = (x[name].squeeze(2).mT for name in ("B", "C"))
        given = (x["x"].squeeze(3).mT, x["dt"].mT, a, b, c)
        out, final = function(*given, return_last_state=True, **options)
        return out.mT.unsqueeze(3), final.unsqueeze(3)

    turned = {name: x.mT for name, x in tokens.items()}
    dt = _step(turned["dt"], options.get("delta_bias"), bool(options.get("delta_softplus")))
    # Every channel is a head with one value; all of them share B and C.
    turned |= {"x": turned["x"].unsqueeze(3), "B": turned["B"].unsqueeze(2), "C": turned["C"].unsqueeze(2)}
    decay = Decay(turned["C"], dt, a)
    where: Given = {"group": group, "cu_seqlens": cu_seqlens, "parents": parents, "layout": layout, "config": config}
    out, final = dist_scan(Scan(run, "B", "x"), turned, decay=decay, **where)
    out = out.squeeze(3).mT
    return out if z is None else out * F.silu(z), final.squeeze(3)


def drops_gradient(function: Any) -> bool:
    """Return whether a function is mamba-ssm's, or calls it: transformers' dispatchers hold it in a closure."""
    inside = [function]
    for each in inside:  # which grows
        cells = getattr(getattr(each, "forward", each), "__closure__", None) or ()
        inside += [x for x in (cell.cell_contents for cell in cells) if callable(x) and x not in inside]
    return any(str(getattr(each, "__module__", "")).startswith("mamba_ssm") for each in inside)


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    """Return the step size that the kernels make of (batch, tokens, heads or channels), in float32 as they do."""
    dt = dt.to(accumulator_dtype(dt.dtype))
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may save it for a backward
def _offsets(documents: Offsets, device: torch.device) -> torch.Tensor:
    """Return int64 (documents + 1), the same tensor for all layers: kernels keep what they derive from it."""
    return torch.tensor(documents, device=device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def _numbers(documents: Offsets, device: torch.device) -> torch.Tensor:
    """Return the number of each token's document, int32 (1, tokens)."""
    starts = torch.zeros(documents[-1], dtype=torch.int32)
    starts[list(documents[1:-1])] = 1
    return starts.cumsum(0, dtype=torch.int32)[None].to(device)
