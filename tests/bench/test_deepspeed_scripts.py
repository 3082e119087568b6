"""Which lengths are tried for the longest sequence, in what order, and when no more are."""

from __future__ import annotations

from typing import Any

from benchmarks import deepspeed_longest as script


def tried(limits: dict[str, int], budget: float, broken: int | None = None) -> list[tuple[str, int, str]]:
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
            spent[0] += 10
            result["failed"] = f"{script.MEMORY}: all of it"
        else:
            spent[0] += 10 + step
            result |= {"seconds_per_step": step, "seconds_in_all": 10 + step}
        found.append((method, length, str(result.get("failed", "ran"))[:11]))
        return result

    script.search(list(limits), 1000, attempt, lambda: budget - spent[0])
    return found


def test_lengths_double_until_memory_ends_and_then_one_between_is_tried() -> None:
    assert tried({"a": 3500, "b": 2000}, budget=1e6) == [
        ("a", 1000, "ran"), ("a", 2000, "ran"), ("a", 4000, "out of memo"), ("a", 3000, "ran"),
        ("b", 1000, "ran"), ("b", 2000, "ran"), ("b", 4000, "out of memo"), ("b", 3000, "out of memo"),
    ]  # fmt: skip


def test_every_method_has_its_share_of_the_time_left() -> None:
    found = tried({"a": 10**9, "b": 10**9}, budget=120.0)  # as if each had 60 s alone
    assert [(method, length) for method, length, outcome in found if outcome == "ran"] == [
        (method, length) for method in ("a", "b") for length in (1000, 2000, 4000)
    ]


def test_a_step_that_would_outlast_the_budget_is_not_begun() -> None:
    found = tried({"a": 10**9}, budget=60.0)  # 11 s, 14 s, 26 s; then 74 s of 9
    assert found == [("a", 1000, "ran"), ("a", 2000, "ran"), ("a", 4000, "ran"), ("a", 8000, "no time lef")]


def test_another_error_than_memory_ends_a_method_and_no_other() -> None:
    found = tried({"a": 10**9, "b": 10**9}, budget=200.0, broken=2000)
    assert [(length, outcome) for _, length, outcome in found] == [
        (1000, "ran"), (2000, "RuntimeErro"), (1000, "ran"), (2000, "RuntimeErro"),
    ]  # fmt: skip
