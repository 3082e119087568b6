"""Ranks that disagree: the same readable error on every rank, and never a hang."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.plan.schedules import SCHEDULES
from dfa_megatron.plan.schedules.route import direct
from tests.support.arguments import arguments
from tests.support.groups import alone
from tests.support.workers import run_ranks


def attempt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> str:
    """The error of one attention as text, or nothing; with cu_seqlens that of a pack."""
    packed = "cu_seqlens" in options
    try:
        function: Any = dfa_megatron.dist_flash_attn_varlen_func if packed else dfa_megatron.dist_flash_attn_func
        function(q, k, v, **arguments(**options))
    except DistAttentionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tensors(
    local: int = 8, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, local, h, 16).to(dtype) for h in (heads, kv_heads, kv_heads))


def _mismatches(rank: int, ranks: int) -> dict[str, str]:
    odd = rank == ranks - 1
    return {
        "length": attempt(*tensors(local=10 if odd else 8)),
        "dtype": attempt(*tensors(dtype=torch.float64 if odd else torch.float32)),
        "schedule": attempt(*tensors(local=6), schedule="ring" if odd else "balanced"),
        "scale": attempt(*tensors(local=4), softmax_scale=0.5 if odd else 0.25),
        "kernel": attempt(*tensors(local=12), kernel="reference" if odd else "cpu"),
        "window": attempt(*tensors(local=14), window_size=(3, 0) if odd else (4, 0)),
        "heads": attempt(*tensors(heads=3 if odd else 4)),
        "agreed": attempt(*tensors(local=16)),
        "always": attempt(*tensors(local=18), verify="off") + attempt(*tensors(local=18), verify="off"),
    }


@pytest.mark.support("runtime", "ranks that disagree are told how")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_is_told_what_differs(ranks: int) -> None:
    reports = run_ranks(ranks, _mismatches, timeout=90)
    for report in reports:
        assert "shape of q: (1, 8, 4, 16)" in report["length"]
        assert "(1, 10, 4, 16)" in report["length"]
        assert "  dtype: torch.float" in report["dtype"]
        assert "request.schedule: 'balanced' on rank" in report["schedule"]
        assert "request.softmax_scale: 0.25" in report["scale"]
        assert "cpu on rank" in report["kernel"]
        assert "reference on rank" in report["kernel"]
        assert "request.window_size" in report["window"]
        assert "heads must be a multiple of kv_heads" in report["heads"]
        assert report["agreed"] == report["always"] == ""
    for field in ("length", "dtype", "schedule", "scale", "kernel", "window"):
        assert len({report[field] for report in reports}) == 1, "the same text on every rank"


def _facts_of_its_own(rank: int, ranks: int) -> dict[str, str]:
    """Equal requests over equal tensors, where the last rank has another plan by the same name, or other versions."""

    def told(local: int, owner: Any, name: str, value: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if rank == ranks - 1:
                (patch.setitem if isinstance(owner, dict) else patch.setattr)(owner, name, value)
            return attempt(*tensors(local=local), schedule="ring")

    return {
        "plan": told(26, SCHEDULES, "ring", dataclasses.replace(SCHEDULES["ring"], route=direct)),
        "dfa_megatron": told(28, dfa_megatron, "__version__", "0.0.other"),
        "torch": told(30, torch, "__version__", "0.0.other"),
    }


def test_ranks_with_another_plan_or_other_versions_are_told_so() -> None:
    for report in run_ranks(3, _facts_of_its_own, timeout=40):
        assert report["plan"].startswith("DisagreementError")
        assert report["plan"].count("digest") == 2
        for package in ("dfa_megatron", "torch"):
            assert f"  {package}: " in report[package]
            assert "0.0.other on rank 2" in report[package]


def _bad_requests(rank: int, ranks: int) -> dict[str, str]:
    return {
        "schedule": attempt(*tensors(), schedule="balansed"),
        "kernel": attempt(*tensors(), kernel="cudnn"),
        "unknown kernel": attempt(*tensors(), kernel="flash9"),
        "layout": attempt(*tensors(), layout="zigzag", schedule="balanced"),
        "softcap": attempt(*tensors(), softcap=30.0, kernel="cpu"),
        "negative softcap": attempt(*tensors(), softcap=-30.0),
        "scale 0": attempt(*tensors(), softmax_scale=0.0),
        "scale nan": attempt(*tensors(), softmax_scale=float("nan"), kernel="reference"),
        "mask": attempt(*tensors(), causal=False, schedule="balanced"),
        "zigzag": attempt(*tensors(local=7), layout="zigzag"),
        "three": attempt(*(x[0] for x in tensors())),
        "k and v": attempt(tensors()[0], tensors()[1], tensors(kv_heads=4)[2]),
        "transport": attempt(*tensors(), transport="nccl"),
        "copy engine": attempt(*tensors(), transport="copy_engine"),
        "graph": attempt(*tensors(), cuda_graph=True),
        "integers": attempt(*tensors(dtype=torch.int32)),
    }


def test_a_request_nobody_can_serve_names_what_would_work() -> None:
    for report in run_ranks(2, _bad_requests):
        assert all(text.startswith("UnsupportedError") for text in report.values()), report
        assert "balanced_shared" in report["schedule"]
        assert "ring" in report["schedule"]
        assert "cuda" in report["kernel"].lower()
        assert "cpu" in report["kernel"]
        assert "reference" in report["unknown kernel"]
        assert "it caps no scores. What works: kernel='reference'" in report["softcap"]
        assert "a softcap is positive and finite" in report["negative softcap"]
        assert "softmax_scale=0.0 is not supported: it is positive and finite" in report["scale 0"]
        assert "softmax_scale=nan is not supported: it is positive and finite" in report["scale nan"]
        assert "zigzag" in report["layout"]
        assert "ring" in report["mask"]
        assert "one of auto, p2p, copy_engine" in report["transport"]
        assert "it moves between GPUs, not on cpu. What works: transport='p2p'" in report["copy engine"]
        assert "cuda_graph=False" in report["graph"]
        assert "multiple of 4" in report["zigzag"]
        assert "16 tokens" in report["zigzag"]


def _one_prepares_alone(rank: int, ranks: int) -> tuple[str, float]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=4))
    assert not attempt(*tensors(), group=group)
    start, report = time.monotonic(), ""
    if rank == 0:
        report = attempt(*tensors(local=20), group=group)
    else:
        time.sleep(2.5)
    return report, time.monotonic() - start


def test_a_rank_that_never_comes_is_an_error_within_a_quarter_of_the_timeout() -> None:
    (report, seconds), _ = run_ranks(2, _one_prepares_alone, timeout=40)
    assert report == "AbsentError: rank 1 of the group did not come within 1 s to prepare this attention"
    assert seconds < 2.5


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


def _packs_of_its_own(rank: int, ranks: int) -> list[str]:
    """Rank 0 attends to more packs by itself than are kept of a group; then all attend to what all have met before."""
    attend = dfa_megatron.dist_flash_attn_varlen_func

    def pack(tokens: int, offsets: tuple[int, ...], **options: object) -> str:
        try:
            attend(*(torch.randn(tokens, 2, 8) for _ in range(3)), offsets, **arguments(**options))
        except DistAttentionError as error:
            return str(error)
        return ""

    told = [pack(4, (0, 4 * ranks))]
    if rank == 0:
        mine = alone()
        told += [pack(70, (0, first, 70), group=mine) for first in range(1, 70)]
    return [*told, pack(4, (0, 4 * ranks))]


def test_what_a_group_knows_is_not_forgotten_for_what_a_rank_does_by_itself() -> None:
    for told in run_ranks(2, _packs_of_its_own, timeout=60):
        assert not any(told)


NO_OPTION: tuple[tuple[str, Any], ...] = (
    ("verify", "yes"),
    ("ulysses_degree", -1),
    ("transport", ["p2p"]),
)


@pytest.mark.parametrize(("name", "value"), NO_OPTION)
def test_the_config_refuses_a_value_that_an_option_cannot_have(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=.*What works"):
        DistAttentionConfig(**{name: value})


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

    told = {name: attempts(**{name.split(",")[0]: value}) for name, value in IMPOSSIBLE.items()}
    told["one rank"] = attempts(**({"window_size": 3} if rank == ranks - 1 else {}))
    return told | {"nothing": attempts(causal=None), "afterwards": attempts()}


def test_both_functions_refuse_impossible_arguments_and_every_rank_hears_of_it() -> None:
    first, last = run_ranks(2, _impossible, timeout=60)
    for name in IMPOSSIBLE:
        for text in (*first[name], *last[name]):
            assert text.startswith(f"UnsupportedError: {name.split(',')[0]}="), f"{name}: {text}"
            assert "What works" in text
    for here, there in zip(first["one rank"], last["one rank"], strict=True):
        assert there.startswith("UnsupportedError: window_size=3")
        assert here.startswith("DisagreementError: rank 1 of the group refuses this attention: window_size=3")
    for text in (*first["nothing"], *last["nothing"]):
        assert text.startswith("UnsupportedError: attention without causal, mask and plan")
    assert first["afterwards"] == last["afterwards"] == ("", "")


def _strangers(rank: int, ranks: int) -> list[str]:
    """Tensors without numbers, and groups that this rank is no member of: as it has them, and by a name."""
    group = dist.new_group([0, 1])
    meta = [x.to("meta") for x in tensors()]
    told = [attempt(*meta, group=alone()), attempt(*tensors(), group="nobody's")]
    if rank == 2:
        return [*told, attempt(*tensors(), group=group)]
    return [*told, attempt(*meta, group=group), attempt(*(tensors() if rank else meta), group=group)]


def test_tensors_without_numbers_and_the_groups_of_others_are_refused() -> None:
    first, second, stranger = run_ranks(3, _strangers, timeout=60)
    for told in (first, second, stranger):
        assert told[0].startswith("UnsupportedError: attention of tensors on meta")
        assert told[1].startswith("UnsupportedError: a process group named")
    assert stranger[2].startswith("UnsupportedError: a process group that this rank is no member of")
    assert first[2].startswith("UnsupportedError: attention of tensors on meta")
    assert second[2] == first[2]
    assert first[3].startswith("UnsupportedError: attention of tensors on meta")
    assert second[3].startswith(
        "DisagreementError: rank 0 of the group refuses this attention: attention of tensors on"
    )
