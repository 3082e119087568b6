"""Which lengths are tried in the search for the longest sequence, in what order, and when no more are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STOPPED = "no time left"
MEMORY = "out of memory"

Attempt = Callable[[str, int, float], dict[str, Any]]
"""From a method, a length and the seconds left to a result: figures, or "failed"."""


def search(
    methods: list[str], shortest: int, attempt: Attempt, left: Callable[[], float], resolution: int | None = None
) -> None:
    """Try every method at every length that there is time for, the shortest first; then between the last two.

    resolution: halve the distance between the longest that ran and the shortest that ran out of memory until it is at
        most so many tokens; None: try one length between.
    """
    alive, fits, full = dict.fromkeys(methods, shortest), dict[str, dict[str, Any]](), dict[str, int]()
    while alive:
        for method, length in list(alive.items()):
            result = guarded(method, length, fits.get(method), attempt, left)
            if "failed" in result:
                del alive[method]
                if result["failed"].startswith(MEMORY):
                    full[method] = length
            else:
                fits[method] = result
                alive[method] = 2 * length
    for method, length in full.items():
        enough = resolution or length // 4
        while method in fits and length - fits[method]["length"] > enough:
            between = (length + fits[method]["length"]) // 2
            result = guarded(method, between, fits[method], attempt, left)
            if "failed" not in result:
                fits[method] = result
            elif result["failed"].startswith(MEMORY):
                length = between
            else:
                break


def guarded(
    method: str, length: int, before: dict[str, Any] | None, attempt: Attempt, left: Callable[[], float]
) -> dict[str, Any]:
    """Attempt a length if the time of a shorter one says that it ends in time: attention grows with its square."""
    seconds = 0.0
    if before is not None:
        steps = before["seconds_per_step"] * (length / before["length"]) ** 2
        seconds = steps + before["seconds_in_all"] - before["seconds_per_step"]
    return attempt(method, length, left() if seconds < left() else 0.0)
