"""Machines: rates by length, links by transport, and nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import simulate
from dfa_megatron.plan.cost.hardware import (
    H200_NIC_400G,
    H200_NVLINK,
    PROFILES,
    Hardware,
    Link,
    computing_with,
    deliver,
    flat,
    profile_named,
)
from dfa_megatron.plan.language.mask import causal
from tests.support.plan_cases import plan_of


def machine(**changes: Any) -> Hardware:
    values = {"name": "m", "forward": flat(1e12), "backward": flat(1e12), "link": Link(1e9, 1e-6)}
    return Hardware(**(values | changes))


def test_a_rate_goes_through_its_points_and_between_them() -> None:
    hardware = machine(forward=((1024, 1e14), (4096, 4e14), (16384, 5e14)))
    for tokens, rate in hardware.forward:
        assert hardware.rate("forward", tokens**2) == pytest.approx(rate)
    assert hardware.rate("forward", 2048**2) == pytest.approx(2e14)
    assert hardware.rate("forward", (1 << 20) ** 2) == 5e14
    assert hardware.rate("forward", 256**2) == pytest.approx(2.5e13)
    assert hardware.rate("backward", 1) == hardware.rate("backward", 1 << 40) == 1e12
    rates = [hardware.rate("forward", tokens**2) for tokens in range(1, 20000, 100)]
    assert rates == sorted(rates)


def test_messages_to_other_nodes_take_the_adapter_beside_the_link() -> None:
    delivered, times = deliver([(0, 1, 2.0, False), (0, 2, 23.0, True), (0, 3, 23.0, True)], [0.0] * 4)
    assert times == {(0, 1): (0.0, 2.0), (0, 2): (0.0, 23.0), (0, 3): (23.0, 46.0)}
    assert delivered == [46.0, 2.0, 23.0, 46.0]


def test_a_network_slower_than_the_links_makes_a_run_slower() -> None:
    plan = plan_of("balanced", causal(16 * 2048), 16)
    fast = dataclasses.replace(H200_NIC_400G, network=H200_NVLINK.link)
    assert simulate(plan, hardware=H200_NIC_400G).makespan > 1.05 * simulate(plan, hardware=fast).makespan
    one_node = dataclasses.replace(H200_NIC_400G, ranks_per_node=16)
    assert simulate(plan, hardware=one_node).makespan == simulate(plan, hardware=H200_NVLINK).makespan


def test_few_heads_with_few_rows_leave_multiprocessors_idle() -> None:
    flash = computing_with("flash4", H200_NVLINK)
    even = dataclasses.replace(flash, forward=flat(600e12))
    rates = [even.rate("forward", 4096**2, rows, heads=2) for rows in (128, 4096, 65536)]
    assert rates == sorted(rates)
    assert rates[0] < 0.1 * rates[2]
    assert flash.rate("forward", 4096**2, 4096, heads=33) == pytest.approx(flash.rate("forward", 4096**2), rel=0.05)
    assert dataclasses.replace(flash, multiprocessors=0).rate("forward", 4096**2, 128, heads=2) == max(
        flash.rate("forward", 4096**2, rows) for rows in (128, 4096)
    )


def test_a_pack_is_as_fast_as_its_documents() -> None:
    flash = computing_with("flash4", H200_NVLINK)
    measured = {524: 294, 1039: 431, 1673: 499, 2116: 529, 3734: 585, 4035: 576}  # of 32K rows: keys a row, TFLOP/s
    for keys, rate in measured.items():
        pairs = 32768 * keys
        forward, backward = (flash.rate(phase, pairs, 32768, 32768) / 1e12 for phase in ("forward", "backward"))
        assert 7 / (2 / forward + 5 / backward) == pytest.approx(rate, rel=0.1)
        assert flash.rate("backward", pairs, 8192) > flash.rate("backward", pairs, 32768), "rows of longer documents"


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    assert {name: profile_named(name) for name in PROFILES} == PROFILES
    with pytest.raises(UnsupportedError, match=r"one of h200-nvlink, h100-nvlink, h200-slow-link, "):
        profile_named("abacus")
