"""Ranks that disagree: the same readable error on every rank, and never a hang."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.plan.schedules.route import direct
from tests.support.arguments import arguments, told
from tests.support.groups import alone
from tests.support.workers import run_ranks


def attempt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> str:
    """The error of one attention as text, or nothing; with cu_seqlens that of a pack."""
    packed = "cu_seqlens" in options
    function: Any = dfa_megatron.dist_flash_attn_varlen_func if packed else dfa_megatron.dist_flash_attn_func
    return told(lambda: function(q, k, v, **arguments(**options)))


def tensors(
    local: int = 8, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, local, h, 16).to(dtype) for h in (heads, kv_heads, kv_heads))


def attempt_given(**given: Any) -> str:
    """The error of one attention over tensors of these sizes with these options."""
    sizes = {name: given.pop(name) for name in ("local", "heads", "kv_heads", "dtype") if name in given}
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


def _mismatches(rank: int, ranks: int) -> dict[str, str]:
    odd = rank == ranks - 1
    found = {
        name: attempt_given(**{"local": 8 + 2 * at} | (theirs if odd else mine))
        for at, (name, (mine, theirs, _)) in enumerate(MISMATCHES.items())
    }
    agreed = attempt_given(local=32) + attempt_given(local=34, verify="off") + attempt_given(local=34, verify="off")
    return found | {"agreed": agreed}


@pytest.mark.support("runtime", "ranks that disagree are told how")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_is_told_what_differs(ranks: int) -> None:
    reports = run_ranks(ranks, _mismatches, timeout=90)
    for report in reports:
        for name, (*_, words) in MISMATCHES.items():
            assert all(word in report[name] for word in words), report[name]
        assert report["agreed"] == ""
    for name in MISMATCHES.keys() - {"heads"}:
        assert len({report[name] for report in reports}) == 1, "the same text on every rank"


def _facts_of_its_own(rank: int, ranks: int) -> dict[str, str]:
    """Equal requests over equal tensors, where the last rank has another plan by the same name, or other versions."""

    def here(local: int, owner: Any, name: str, value: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == ranks - 1:
                (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)
            return attempt(*tensors(local=local), schedule="ring")

    return {
        "plan": here(26, SCHEDULES, "ring", dataclasses.replace(SCHEDULES["ring"], route=direct)),
        "dfa_megatron": here(28, dfa_megatron, "__version__", "0.0.other"),
        "torch": here(30, torch, "__version__", "0.0.other"),
    }


def test_ranks_with_another_plan_or_other_versions_are_told_so() -> None:
    for report in run_ranks(3, _facts_of_its_own, timeout=40):
        assert report["plan"].startswith("DisagreementError")
        assert report["plan"].count("digest") == 2
        for package in ("dfa_megatron", "torch"):
            assert f"  {package}: " in report[package]
            assert "0.0.other on rank 2" in report[package]


BAD_REQUESTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "schedule": ({"schedule": "balansed"}, ("balanced_shared", "ring")),
    "kernel": ({"kernel": "cudnn"}, ("cpu", "CUDA")),
    "unknown kernel": ({"kernel": "flash9"}, ("reference",)),
    "layout": ({"layout": "zigzag", "schedule": "balanced"}, ("zigzag",)),
    "softcap": ({"softcap": 30.0, "kernel": "cpu"}, ("it caps no scores. What works: kernel='reference'",)),
    "negative softcap": ({"softcap": -30.0}, ("a softcap is positive and finite",)),
    "scale 0": ({"softmax_scale": 0.0}, ("Not supported: softmax_scale=0.0: it is positive and finite",)),
    "scale nan": (
        {"softmax_scale": math.nan, "kernel": "reference"},
        ("Not supported: softmax_scale=nan: it is pos",),
    ),
    "mask": ({"causal": False, "schedule": "balanced"}, ("What works: schedule 'auto'",)),
    "transport": ({"transport": "nccl"}, ("one of auto, p2p, copy_engine",)),
    "copy engine": (
        {"transport": "copy_engine"},
        ("it moves between GPUs, not on cpu. What works: transport='p2p'",),
    ),
    "integers": ({"dtype": torch.int32}, ()),
}
"""Options that nobody can serve, and words of the error."""


def _bad_requests(rank: int, ranks: int) -> dict[str, str]:
    q, k, v = tensors()
    flat, uneven = attempt(q[0], k[0], v[0]), attempt(q, k, tensors(kv_heads=4)[2])
    return {name: attempt_given(**given) for name, (given, _) in BAD_REQUESTS.items()} | {"flat": flat, "v": uneven}


def test_a_request_nobody_can_serve_names_what_would_work() -> None:
    for report in run_ranks(2, _bad_requests):
        assert all(text.startswith("UnsupportedError") for text in report.values()), report
        for name, (_, words) in BAD_REQUESTS.items():
            assert all(word in report[name] for word in words), report[name]


def _unequal_groups(rank: int, ranks: int) -> str:
    """Rank 0 is in one group more: PyTorch would give a new group another name there."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    return attempt(*tensors())


def test_ranks_may_be_in_unequal_numbers_of_groups() -> None:
    assert run_ranks(2, _unequal_groups, timeout=60) == ["", ""]


def _broken_kernel(rank: int, ranks: int) -> str:
    from dfa_megatron import kernels

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("out of tea")

    type(kernels.get("reference")).forward = broken
    return attempt(*tensors(), kernel="reference", schedule="balanced")


def test_a_failing_step_shows_where_in_the_grid() -> None:
    for rank, report in enumerate(run_ranks(2, _broken_kernel)):
        assert report.startswith("ExecutionError")
        assert "out of tea" in report
        assert f"rank {rank}, step 0" in report
        assert "<!" in report


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


def _impossible(rank: int, ranks: int) -> dict[str, tuple[str, str]]:
    """Both functions with values that every rank gives, and then with one that only the last rank gives."""

    def attempts(**given: Any) -> tuple[str, str]:
        q, k, v = tensors(local=22)
        return attempt(q, k, v, **given), attempt(q[0], k[0], v[0], cu_seqlens=(0, 22 * ranks), **given)

    found = {name: attempts(**{name.split(",")[0]: value}) for name, value in IMPOSSIBLE.items()}
    found["one rank"] = attempts(**({"window_size": 3} if rank == ranks - 1 else {}))
    return found | {"nothing": attempts(causal=None), "afterwards": attempts()}


def test_both_functions_refuse_impossible_arguments_and_every_rank_hears_of_it() -> None:
    first, last = run_ranks(2, _impossible, timeout=60)
    for name in IMPOSSIBLE:
        for text in (*first[name], *last[name]):
            assert text.startswith(f"UnsupportedError: Not supported: {name.split(',')[0]}="), f"{name}: {text}"
            assert "What works" in text
    for here, there in zip(first["one rank"], last["one rank"], strict=True):
        assert there.startswith("UnsupportedError: Not supported: window_size=3")
        assert here.startswith(
            "DisagreementError: rank 1 of the group refuses this attention: Not supported: window_size=3"
        )
    for text in (*first["nothing"], *last["nothing"]):
        assert text.startswith("UnsupportedError: Not supported: attention without causal, mask and plan")
    assert first["afterwards"] == last["afterwards"] == ("", "")


def _strangers(rank: int, ranks: int) -> list[str]:
    """Tensors without numbers, and groups that this rank is no member of: as it has them, and by a name."""
    group = dist.new_group([0, 1])
    meta = [x.to("meta") for x in tensors()]
    found = [attempt(*meta, group=alone()), attempt(*tensors(), group="nobody's")]
    if rank == 2:
        return [*found, attempt(*tensors(), group=group)]
    return [*found, attempt(*meta, group=group), attempt(*(tensors() if rank else meta), group=group)]


def test_tensors_without_numbers_and_the_groups_of_others_are_refused() -> None:
    first, second, stranger = run_ranks(3, _strangers, timeout=60)
    for found in (first, second, stranger):
        assert found[0].startswith("UnsupportedError: Not supported: attention of tensors on meta")
        assert found[1].startswith("UnsupportedError: Not supported: a process group named")
    assert stranger[2].startswith("UnsupportedError: Not supported: a process group that this rank is no member of")
    assert first[2].startswith("UnsupportedError: Not supported: attention of tensors on meta")
    assert second[2] == first[2]
    assert first[3].startswith("UnsupportedError: Not supported: attention of tensors on meta")
    refused = "DisagreementError: rank 0 of the group refuses this attention: Not supported: attention of tensors on"
    assert second[3].startswith(refused)
