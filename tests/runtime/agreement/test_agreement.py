"""Ranks that disagree: the same readable error on every rank, and never a hang."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron import kernels
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.plan.schedules.assignments import direct
from tests.support.arguments import arguments, tensors, told
from tests.support.groups import alone
from tests.support.workers import over_ranks


def attempt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> str:
    """The error of one attention as text, or nothing; with cu_seqlens that of a pack."""
    packed = "cu_seqlens" in options
    function: Any = dfa_megatron.dist_flash_attn_varlen_func if packed else dfa_megatron.dist_flash_attn_func
    return told(lambda: function(q, k, v, **arguments(**options)))


def attempt_given(**given: Any) -> str:
    """The error of one attention over tensors of these sizes with these options."""
    sizes = {name: given.pop(name) for name in ("local", "heads", "kv_heads", "dtype", "gradients") if name in given}
    return attempt(*tensors(**sizes), **given)


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "length": ({"local": 8}, {"local": 10}, ("shape of q: (1, 8, 4, 16)", "(1, 10, 4, 16)")),
    "dtype": ({"dtype": torch.float32}, {"dtype": torch.float64}, ("  dtype: torch.float",)),
    "schedule": ({"schedule": "balanced"}, {"schedule": "ring"}, ("request.schedule: 'balanced' on rank",)),
    "scale": ({"softmax_scale": 0.25}, {"softmax_scale": 0.5}, ("request.softmax_scale: 0.25",)),
    "kernel": ({"kernel": "cpu"}, {"kernel": "reference"}, ("cpu on rank", "reference on rank")),
    "window": ({"window_size": (4, 0)}, {"window_size": (3, 0)}, ("request.window_size",)),
    "heads": ({"heads": 4}, {"heads": 3}, ("heads must be a multiple of kv_heads",)),
}
"""What the last rank gives, after what the others give, and words of the error."""


@pytest.mark.support("runtime", "ranks that disagree are told how")
@over_ranks(2, 3, timeout=90)
def test_every_rank_is_told_what_differs(rank: int, ranks: int) -> None:
    for at, (name, (mine, theirs, words)) in enumerate(MISMATCHES.items()):
        text = attempt_given(**{"local": 8 + 2 * at} | (theirs if rank == ranks - 1 else mine))
        assert all(word in text for word in words), text
        same: list[Any] = [None] * ranks
        dist.all_gather_object(same, text)
        assert name == "heads" or {*same} == {text}, "the same text on every rank"
    for more in ({"local": 32}, {"local": 34, "verify": "off"}, {"local": 34, "verify": "off"}):
        assert attempt_given(**more) == ""


@over_ranks(3, timeout=40)
def test_ranks_with_another_plan_or_other_versions_are_told_so(rank: int, ranks: int) -> None:
    """Equal requests over equal tensors, where the last rank has another plan by the same name, or other versions."""

    def here(local: int, owner: Any, name: str, value: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == ranks - 1:
                (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)
            return attempt(*tensors(local=local), schedule="ring")

    told = here(26, SCHEDULES, "ring", dataclasses.replace(SCHEDULES["ring"], route=direct))
    assert told.startswith("DisagreementError")
    assert told.count("digest") == 2
    for local, package in ((28, dfa_megatron), (30, torch)):
        told = here(local, package, "__version__", "0.0.other")
        assert f"  {package.__name__}: " in told
        assert "0.0.other on rank 2" in told


BAD_REQUESTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"schedule": "balansed"}, ("balanced_shared", "ring")),
    ({"kernel": "cudnn"}, ("cpu", "CUDA")),
    ({"kernel": "flash9"}, ("reference",)),
    ({"layout": "zigzag", "schedule": "balanced"}, ("zigzag",)),
    ({"softcap": 30.0, "kernel": "cpu"}, ("it caps no scores. What works: kernel='reference'",)),
    ({"softcap": -30.0}, ("a softcap is positive and finite",)),
    ({"softmax_scale": 0.0}, ("Not supported: softmax_scale=0.0: it is positive and finite",)),
    ({"softmax_scale": math.nan, "kernel": "reference"}, ("Not supported: softmax_scale=nan: it is pos",)),
    ({"causal": False, "schedule": "balanced"}, ("What works: schedule 'auto'",)),
    ({"transport": "nccl"}, ("one of auto, p2p, copy_engine",)),
    ({"transport": "copy_engine"}, ("it moves between GPUs, not on cpu. What works: transport='p2p'",)),
    ({"dtype": torch.int32, "gradients": ""}, ()),
]
"""Options that nobody can serve, and words of the error."""


@over_ranks(2)
def test_a_request_nobody_can_serve_names_what_would_work(rank: int, ranks: int) -> None:
    q, k, v = tensors()
    for flat_or_uneven in ((q[0], k[0], v[0]), (q, k, tensors(kv_heads=4)[2])):
        assert attempt(*flat_or_uneven).startswith("UnsupportedError")
    for given, words in BAD_REQUESTS:
        text = attempt_given(**given)
        assert text.startswith("UnsupportedError"), given
        assert all(word in text for word in words), text


@over_ranks(2)
def test_ranks_may_be_in_unequal_numbers_of_groups(rank: int, ranks: int) -> None:
    """Rank 0 is in one group more: PyTorch would give a new group another name there."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    assert attempt(*tensors()) == ""


@over_ranks(2)
def test_a_failing_step_shows_where_in_the_grid(rank: int, ranks: int) -> None:
    with patch.object(type(kernels.get("reference")), "forward", side_effect=RuntimeError("out of tea")):
        report = attempt(*tensors(), kernel="reference", schedule="balanced")
    assert report.startswith("ExecutionError")
    assert all(words in report for words in ("out of tea", f"rank {rank}, step 0", "<!"))


IMPOSSIBLE: dict[str, Any] = {
    "window_size": (3, 0, 0),
    "window_size, below -1": (-2, 0),
    "window_size, fractions": (2.5, 0),
    "window_size, one": 3,
    "causal": "yes",
    "causal, without a hash": ["yes"],
    "softcap": "2",
    "layout": "zigzaf",
}
"""Values that an argument cannot have, by its name."""


@over_ranks(2)
def test_both_functions_refuse_impossible_arguments_and_every_rank_hears_of_it(rank: int, ranks: int) -> None:
    """Values that every rank gives, then one that only the last rank gives."""

    def attempts(**given: Any) -> tuple[str, str]:
        q, k, v = tensors(local=22)
        return attempt(q, k, v, **given), attempt(q[0], k[0], v[0], cu_seqlens=(0, 22 * ranks), **given)

    for name, value in IMPOSSIBLE.items():
        for text in attempts(**{name.split(",")[0]: value}):
            assert text.startswith(f"UnsupportedError: Not supported: {name.split(',')[0]}="), f"{name}: {text}"
            assert "What works" in text
    own = "UnsupportedError: " if rank else "DisagreementError: rank 1 of the group refuses this attention: "
    for text in attempts(**({"window_size": 3} if rank else {})):
        assert text.startswith(f"{own}Not supported: window_size=3")
    for text in attempts(causal=None):
        assert text.startswith("UnsupportedError: Not supported: attention without causal, mask and plan")
    assert attempts() == ("", "")


@over_ranks(3)
def test_tensors_without_numbers_and_the_groups_of_others_are_refused(rank: int, ranks: int) -> None:
    """Groups that this rank is no member of: as it has them, and by a name."""
    group, meta = dist.new_group([0, 1]), [x.to("meta") for x in tensors()]
    refused, no_numbers = "UnsupportedError: Not supported: ", "attention of tensors on meta"
    assert attempt(*meta, group=alone()).startswith(refused + no_numbers)
    assert attempt(*tensors(), group="nobody's").startswith(f"{refused}a process group named")
    if rank == 2:
        told = attempt(*tensors(), group=group)
        assert told.startswith(f"{refused}a process group that this rank is no member of")
        return
    both: list[Any] = [None, None]
    dist.all_gather_object(both, attempt(*meta, group=group), group=group)
    assert both[0] == both[1]
    assert both[0].startswith(refused + no_numbers)
    of_one = "DisagreementError: rank 0 of the group refuses this attention: Not supported: " if rank else refused
    assert attempt(*(tensors() if rank else meta), group=group).startswith(of_one + no_numbers)
