"""Machines: rates by length, links by transport, nodes, and profiles that go through a file unchanged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import (
    H200_NIC_400G,
    H200_NVLINK,
    H200_SLOW_LINK,
    PROFILES,
    Hardware,
    Host,
    Link,
    computing_with,
    flat,
    from_json,
    profile_named,
    save,
    to_json,
)
from dfa_megatron.plan.cost.outline import deliver
from dfa_megatron.plan.cost.simulate import simulate
from dfa_megatron.plan.language.mask import causal
from tests.support.plan_cases import plan_of


def machine(**changes: Any) -> Hardware:
    values = {"name": "m", "forward": flat(1e12), "backward": flat(1e12), "links": (Link("p2p", 1e9, 1e-6),)}
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


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_goes_through_a_file_unchanged(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    save(PROFILES[name], path)
    assert PROFILES[name] == profile_named(name) == profile_named(str(path))
    assert json.loads(path.read_text())["name"] == name


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    values = json.loads(to_json(H200_NIC_400G))
    change(values)
    return json.dumps(values)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda v: v.pop("backward"), "does not know backward"),
        (lambda v: v.update(speed=3, colour=4), "does not know colour, speed"),
        (lambda v: v.update(format="2"), "format '2'"),
        (lambda v: v.update(name=""), "is no name"),
        (lambda v: v.update(forward=[[4096, 1e14], [1024, 1e14]]), "must be positive and increase"),
        (lambda v: v.update(backward=[[4096, 0]]), "backward=0.*must be positive"),
        (lambda v: v.update(backward=[[4096, "fast"]]), "'fast' is no finite number"),
        (lambda v: v.update(launch_overhead=-1), "launch_overhead=-1"),
        (lambda v: v.update(ranks_per_node=8.0), "no whole number"),
        (lambda v: v.update(ranks_per_node=None), "nodes need a network"),
        (lambda v: v.update(network={"transport": "p2p"}), "network.*does not know bytes_per_second, latency"),
        (lambda v: v.update(links=[]), "at least one"),
        (lambda v: v.update(links=v["links"] * 2), "one per transport"),
        (lambda v: v["links"][0].update(latency=None), "links, latency.*None is no finite number"),
        (lambda v: v["links"][0].update(transport=3), "3 is no name"),
        (lambda v: v["host"].update(call=-1), "host, call=-1"),
        (lambda v: v.update(all_to_all=0), "all_to_all=0.*must be positive"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_with_the_key(change: Callable[..., object], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint) as refusal:
        from_json(edited(change), "the profile x.json")
    assert str(refusal.value).startswith("Not supported: the profile x.json")


def test_a_file_from_before_a_key_was_measured_is_read() -> None:
    for key, value in (("all_to_all", None), ("host", Host()), ("multiprocessors", None)):
        older = edited(lambda v, key=key: v.pop(key))  # type: ignore[misc]
        assert from_json(older) == dataclasses.replace(H200_NIC_400G, **{key: value})


def test_few_heads_with_few_rows_leave_multiprocessors_idle() -> None:
    flash = computing_with("flash4", H200_NVLINK)
    even = dataclasses.replace(flash, forward=flat(600e12))
    rates = [even.rate("forward", 4096**2, rows, heads=2) for rows in (128, 4096, 65536)]
    assert rates == sorted(rates)
    assert rates[0] < 0.1 * rates[2]
    assert flash.rate("forward", 4096**2, 4096, heads=33) == pytest.approx(flash.rate("forward", 4096**2), rel=0.05)
    assert dataclasses.replace(flash, multiprocessors=None).rate("forward", 4096**2, 128, heads=2) == max(
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


def test_an_exchange_takes_the_rate_of_where_it_goes() -> None:
    assert H200_SLOW_LINK.seconds_of_exchange(2, 26 * 10**9) == pytest.approx(1, abs=1e-3)
    assert H200_SLOW_LINK.seconds_of_exchange(4, 30 * 10**9) == pytest.approx(1, abs=1e-3)
    assert H200_NVLINK.seconds_of_exchange(2, 180 * 10**9) == pytest.approx(1, abs=1e-3), "the copies, not the link"
    assert dataclasses.replace(H200_SLOW_LINK, all_to_all=None).seconds_of_exchange(4, 26 * 10**9) > 1
    assert H200_NIC_400G.seconds_of_exchange(8, 180 * 10**9) == pytest.approx(1, abs=1e-3)
    assert H200_NIC_400G.seconds_of_exchange(16, 45 * 10**9) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("text", ["", "[]", "{", "3", '{"name": NaN}'])
def test_what_is_no_profile_at_all_is_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="the profile"):
        from_json(text)


def test_an_unknown_machine_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"h200-nvlink, h100-nvlink, h200-slow-link, .* or a .json file"):
        profile_named("abacus")
    with pytest.raises(UnsupportedError, match="No such file"):
        profile_named(str(tmp_path / "nowhere.json"))
