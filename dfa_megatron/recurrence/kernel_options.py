"""Options of other packages' kernels: known by name and passed on, or refused before a rank runs one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.names import nearest

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
