"""Which lengths are tried for the longest sequence, in what order, and when no more are."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import deepspeed_longest as script


def tried(limits: dict[str, int], budget: float, broken: int | None) -> list[tuple[str, int, str]]:
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


ENDLESS = 10**9


@pytest.mark.parametrize(
    ("limits", "budget", "broken", "expected"),
    [
        pytest.param({"a": 3500, "b": 2000}, 1e6, None, [
            ("a", 1000, "ran"), ("a", 2000, "ran"), ("a", 4000, "out of memo"), ("a", 3000, "ran"),
            ("b", 1000, "ran"), ("b", 2000, "ran"), ("b", 4000, "out of memo"), ("b", 3000, "out of memo"),
        ], id="lengths-double-until-memory-ends-and-then-one-between-is-tried"),
        pytest.param({"a": ENDLESS, "b": ENDLESS}, 120.0, None, [  # as if each had 60 s alone: 11 s, 14 s, 26 s
            (name, length, "ran" if length < 8000 else "no time lef")
            for name in ("a", "b") for length in (1000, 2000, 4000, 8000)
        ], id="a-step-that-would-outlast-its-share-of-the-time-is-not-begun"),
        pytest.param({"a": ENDLESS, "b": ENDLESS}, 200.0, 2000, [
            (name, *said) for name in ("a", "b") for said in ((1000, "ran"), (2000, "RuntimeErro"))
        ], id="another-error-than-memory-ends-a-method-and-no-other"),
    ],
)  # fmt: skip
def test_lengths_are_tried_in_order(
    limits: dict[str, int], budget: float, broken: int | None, expected: list[tuple[str, int, str]]
) -> None:
    assert tried(limits, budget, broken) == expected
