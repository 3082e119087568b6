"""The machine on which `auto` compares costs."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron.plan.cost import choose
from dfa_megatron.plan.cost.hardware import CPU_LOOPBACK, H200_NVLINK, H200_SLOW_LINK, computing_with
from dfa_megatron.plan.language.mask import of_window
from dfa_megatron.runtime import prepare
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.environment import Links, links
from dfa_megatron.runtime.planning import profile_of
from dfa_megatron.runtime.prepare import build
from dfa_megatron.runtime.request import Inputs, Request
from tests.support.arguments import arguments
from tests.support.workers import over_ranks

RANKS = 8


def tensors(heads: int = 32, tokens: int = 4096) -> list[torch.Tensor]:
    return [torch.empty((), dtype=torch.bfloat16).expand(1, tokens, heads, 128) for _ in range(3)]


def test_the_schedule_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, schedule in ((H200_NVLINK, "balanced_shared"), (H200_SLOW_LINK, "balanced")):
        monkeypatch.setattr(prepare, "profile_of", lambda *_, machine=machine: machine)
        found = build(Request(**arguments(softmax_scale=1.0)), RANKS, 0, Inputs(*tensors()))
        assert found.plan.schedule == schedule


@pytest.mark.parametrize("seed", range(4))
def test_every_call_is_planned_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, timed, real = random.Random(seed), list[tuple[str, str]](), choose._priced
    monkeypatch.setattr(choose, "_priced", lambda way, *rest: timed.append((way.name, way.layout)) or real(way, *rest))
    tokens, window = 1024 * draw.randint(8, 40), draw.choice([(-1, -1), (draw.randint(1, 5000), 0)])
    causal = draw.random() < 0.7
    mask = of_window(RANKS * tokens, causal, window)
    monkeypatch.setattr(prepare, "profile_of", lambda *_: H200_NVLINK)
    found = []
    for asked in ({"causal": causal, "window_size": window}, {"mask": mask}):
        made = build(Request(**arguments(softmax_scale=1.0, **asked)), RANKS, 0, Inputs(*tensors(tokens=tokens)))
        assert timed, "schedules were compared"
        assert len({*timed}) == len(timed), "each once"
        found.append([*timed])
        timed.clear()
        assert made.plan.forward.mask.tiles == mask.tiles
        timed.clear()
    assert found[0] == found[1]


def test_rates_are_those_of_the_kernel_and_a_cpu_is_one() -> None:
    assert profile_of(True, None, "flash4", 1) == computing_with("flash4", H200_NVLINK)
    assert profile_of(False, None, "cpu", 1) == CPU_LOOPBACK


@pytest.mark.parametrize(
    ("environment", "adapters", "wanted"),
    [
        ({}, True, ("p2p", "adapters")),
        ({}, False, ("p2p", "sockets")),
        ({"NCCL_IB_DISABLE": "1"}, True, ("p2p", "sockets")),
        ({"NCCL_NET": "Socket"}, True, ("p2p", "sockets")),
        ({"NCCL_NET_PLUGIN": "ofi"}, False, ("p2p", "adapters")),
        ({"NCCL_P2P_DISABLE": "1"}, True, ("memory", "adapters")),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, False, ("network", "sockets")),
    ],
)
def test_links_are_what_nccl_is_told_and_finds(
    environment: dict[str, str], adapters: bool, wanted: Links, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if adapters:
        (tmp_path / "mlx5_0").mkdir()
    assert links(tmp_path) == wanted


@pytest.mark.parametrize(
    ("hosts", "found", "machine", "per_node"),
    [
        (1, Links(), "h200-nvlink", None),
        (1, Links("memory", "sockets"), "h200-slow-link", None),
        (1, Links("network", "sockets"), "h200-sockets", 1),
        (2, Links("p2p", "sockets"), "h200-sockets", 4),
        (2, Links(), "h200-nic-400g", 4),
    ],
)
def test_auto_simulates_the_links_that_the_ranks_told(
    hosts: int, found: Links, machine: str, per_node: int | None
) -> None:
    over: Any = SimpleNamespace(hosts=hosts, links=found, size=8)
    hardware = profile_of(True, over, "reference", 8)
    assert (hardware.name, hardware.ranks_per_node) == (machine, per_node)


@over_ranks(2)
def test_every_rank_plans_for_the_slowest_links_of_all(rank: int, ranks: int) -> None:
    """The environment of the last rank alone forbids something."""
    if rank == ranks - 1:
        os.environ.update(NCCL_P2P_DISABLE="1", CUDA_DEVICE_MAX_CONNECTIONS="1")
    made = channel_of(None)
    assert (made.links.inside, made.one_queue) == ("memory", True)
