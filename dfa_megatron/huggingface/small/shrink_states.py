"""Make the states of a hybrid's layers small: those of delta rules and of state spaces."""

from __future__ import annotations

import math

from dfa_megatron.proving.small_job import HEAD, Small

STATE_EPS = 1e-2
"""Of norms: a state that few tokens have filled is small, and a smaller eps would enlarge its rounding."""
MOST = 8
"""Heads of a state space."""
_SIZES = (
    "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_chunk_size",
    "ssm_state_size", "chunk_size",
)  # fmt: skip
_HEADS = {"mamba_n_heads": "mamba_d_head", "mamba_num_heads": "mamba_head_dim", "n_mamba_heads": "mamba_headdim"}
"""Heads of a state space, and their width."""
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_EPS = ("layer_norm_epsilon", "norm_eps", "rms_norm_eps")


def shrink_states(small: Small) -> None:
    """Bound the sizes of states, with two key heads at the ratio of value heads to them; call it after `hidden_size`.

    The product of heads and width stays what a config's other entries say it is.
    """
    small.most(*_SIZES, most=HEAD)
    for name in _EPS:
        small.set(name, STATE_EPS)
    small.most("linear_num_heads", most=2)
    if keys := small.get("linear_num_key_heads"):
        few = min(2, keys)
        small.set("linear_num_value_heads", few * small.get("linear_num_value_heads") // keys)
        small.set("linear_num_key_heads", few)
    for heads, width in _HEADS.items():
        if not (small.get(heads) and small.get(width)):
            continue
        said = small.get("mamba_d_ssm")
        if small.get("mamba_expand") and not said:
            inner = small.get("mamba_expand") * small.get("hidden_size")
            small.set(width, math.gcd(HEAD, inner))
            small.set(heads, inner // small.get(width))
        else:
            small.most(heads, most=MOST)
            small.most(width, most=HEAD)
            small.set("mamba_d_ssm", said and small.get(heads) * small.get(width))
        for name in _GROUPS:
            if groups := small.get(name):
                small.set(name, math.gcd(min(2, groups), small.get(heads)))
