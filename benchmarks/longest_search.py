"""Which lengths are tried in the search for the longest sequence, in what order, and when no more are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

STOPPED = "no time left"
MEMORY = "out of memory"

Attempt = Callable[[str, int, float], dict[str, Any]]
"""From a method, a length and the seconds left to a result: figures, or "failed"."""


def search(
    methods: list[str],
    shortest: int,
    attempt: Attempt,
    left: Callable[[], float],
    resolution: int | None = None,
    memory_gib: float | None = None,
) -> None:
    """Try every method at every length that there is time for, the shortest first; then between the last two.

    resolution: take one method after the other, and come nearer until the shortest length that ran out of memory is at
        most so many tokens from the longest that ran; None: try one length between.
    memory_gib: of a GPU; with it and a resolution, the next length is the one that the last peak says will fit.
    """
    if resolution:
        for method in methods:
            approach(method, shortest, attempt, left, resolution, memory_gib)
        return
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
        if method in fits:
            guarded(method, (length + fits[method]["length"]) // 2, fits[method], attempt, left)


def approach(
    method: str, shortest: int, attempt: Attempt, left: Callable[[], float], resolution: int, memory_gib: float | None
) -> None:
    """Try lengths of one method, `shortest` and multiples of `resolution` more, until neighbors fit and do not."""
    fit: dict[str, Any] | None = None
    full, failures, length = 0, 0, shortest
    while True:
        result = guarded(method, length, fit, attempt, left)
        if "failed" not in result:
            fit, failures = result, 0
        elif result["failed"].startswith(MEMORY):
            full, failures = length, failures + 1
        else:
            return
        if fit is None or 0 < full <= fit["length"] + resolution:
            return
        low = fit["length"]
        length = expected(fit, memory_gib) or 2 * low
        if full:
            middle = (low + full) // 2
            length = max(min(length, full - resolution * 2 ** max(failures - 1, 0)), middle) if memory_gib else middle
        length = max(length - (length - shortest) % resolution, low + resolution)


def expected(fit: dict[str, Any], memory_gib: float | None) -> int | None:
    """Return the length whose peak is `memory_gib`: what is above the memory at rest grows with the length."""
    if not memory_gib or fit.get("peak_gib", 0.0) <= fit.get("resting_gib", 0.0):
        return None
    return int(fit["length"] * (memory_gib - fit["resting_gib"]) / (fit["peak_gib"] - fit["resting_gib"]))


def guarded(
    method: str, length: int, before: dict[str, Any] | None, attempt: Attempt, left: Callable[[], float]
) -> dict[str, Any]:
    """Attempt a length if the time of a shorter one says that it ends in time: attention grows with its square."""
    seconds = 0.0
    if before is not None:
        steps = before["seconds_per_step"] * (length / before["length"]) ** 2
        seconds = steps + before["seconds_in_all"] - before["seconds_per_step"]
    return attempt(method, length, left() if seconds < left() else 0.0)
