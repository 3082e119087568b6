"""Which lengths are tried for the longest sequence, in what order, and when no more are."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("benchmarks.deepspeed_longest")


def tried(
    script: ModuleType,
    limits: dict[str, int],
    budget: float,
    broken: int | None = None,
    startup: float = 10.0,
    resolution: int | None = None,
    memory: float | None = None,
    spread: float = 1.0,
) -> list[tuple[str, int, str]]:
    """Attempts on a machine whose methods run out of memory above a length, and whose clock is theirs."""
    spent, found = [0.0], []

    def attempt(method: str, length: int, seconds: float) -> dict[str, Any]:
        step = (length / 1000) ** 2
        result: dict[str, Any] = {"method": method, "length": length}
        if seconds <= 0:
            result["failed"] = script.STOPPED
        elif length == broken:
            result["failed"] = "RuntimeError: CUDA error: an illegal memory access was encountered"
        elif length > limits[method]:
            spent[0] += startup
            result["failed"] = f"{script.MEMORY}: all of it"
        else:
            spent[0] += startup + step
            result |= {"length": length, "seconds_per_step": step, "seconds_in_all": startup + step}
            result |= {"peak_gib": 2.0 + 38.0 * length / limits[method] * spread, "resting_gib": 2.0}
        found.append((method, length, str(result.get("failed", "ran"))[:11]))
        return result

    script.search(list(limits), 1000, attempt, lambda: budget - spent[0], resolution, memory)
    return found


def test_lengths_double_until_memory_ends_and_then_one_between_is_tried(script: ModuleType) -> None:
    assert tried(script, {"a": 3500, "b": 2000}, budget=1e6) == [
        ("a", 1000, "ran"), ("a", 2000, "ran"), ("a", 4000, "out of memo"), ("a", 3000, "ran"),
        ("b", 1000, "ran"), ("b", 2000, "ran"), ("b", 4000, "out of memo"), ("b", 3000, "out of memo"),
    ]  # fmt: skip


def test_every_method_has_its_share_of_the_time_left(script: ModuleType) -> None:
    found = tried(script, {"a": 10**9, "b": 10**9}, budget=120.0)  # as if each had 60 s alone
    assert [(method, length) for method, length, outcome in found if outcome == "ran"] == [
        (method, length) for method in ("a", "b") for length in (1000, 2000, 4000)
    ]


def test_with_a_resolution_the_distance_is_halved_until_it_is_reached(script: ModuleType) -> None:
    found = tried(script, {"a": 3300}, budget=1e6, resolution=250)
    assert [(length, outcome == "ran") for _, length, outcome in found] == [
        (1000, True), (2000, True), (4000, False), (3000, True), (3500, False), (3250, True),
    ]  # fmt: skip


@pytest.mark.parametrize(("spread", "lengths"), [
    (1.0, [1000, 9250, 9500]),  # the peak says it
    (0.99, [1000, 9250, 9500]),
    (0.95, [1000, 9750, 9500, 9000, 9250]),  # somewhat more is taken than peaks say
    (0.8, [1000, 11500, 11250, 10750, 9750, 7750, 9500, 9250]),
    (1.05, [1000, 8750, 9000, 9250, 9500]),  # other tensors are the peak of short sequences
])  # fmt: skip
def test_the_peak_of_a_length_that_fits_says_which_is_tried_next(
    script: ModuleType, spread: float, lengths: list[int]
) -> None:
    found = tried(script, {"a": 9300}, budget=1e6, resolution=250, memory=40.0, spread=spread)
    assert [length for _, length, _ in found] == lengths
    ran = [length for _, length, outcome in found if outcome == "ran"]
    assert (max(ran), min(set(lengths) - set(ran))) == (9250, 9500)


def test_a_step_that_would_outlast_the_budget_is_not_begun(script: ModuleType) -> None:
    found = tried(script, {"a": 10**9}, budget=60.0)  # 11 s, 14 s, 26 s; then 74 s of 9
    assert found == [("a", 1000, "ran"), ("a", 2000, "ran"), ("a", 4000, "ran"), ("a", 8000, "no time lef")]


def test_another_error_than_memory_ends_a_method_and_no_other(script: ModuleType) -> None:
    found = tried(script, {"a": 10**9, "b": 10**9}, budget=200.0, broken=2000)
    assert [(length, outcome) for _, length, outcome in found] == [
        (1000, "ran"), (2000, "RuntimeErro"), (1000, "ran"), (2000, "RuntimeErro"),
    ]  # fmt: skip
