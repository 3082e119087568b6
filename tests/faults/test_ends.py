"""A rank that is killed, stopped or fails, anywhere in a training: the others end with its name, soon and rightly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.training import RANKS, Fault, Run, recorded, run_training

PLACES = ("agreement", "forward", "backward", "optimizer", "checkpoint")
"""Of a training. forward and backward: inside of the kernel of an attention."""
KINDS = ("kill -9", "SIGSTOP", "exception")
FAULTS = [
    Fault(kind, where, (at + of) % RANKS, step=0 if where == "agreement" else 2)
    for of, kind in enumerate(KINDS)
    for at, where in enumerate(PLACES)
] + [
    Fault("SIGSTOP", "agreement", 0, step=0),  # rank 0 keeps the store in which the others would look for it
    Fault("out of memory", "agreement", 1, step=0),
    Fault("out of memory", "forward", 2),
    Fault("out of memory", "backward", 0),
    Fault("out of memory", "layer forward", 0),
    Fault("out of memory", "layer backward", 2),
]
"""Every fault in every place, every fault on every rank, every rank in every place."""
WORDS = {
    "kill -9": ("has ended", "did not come within 3 s"),
    "SIGSTOP": ("gives no sign of life", "did not come within 3 s"),
    "exception": ("an accident of this test", "has ended"),
    "out of memory": ("out of memory in this test", "run different attentions", "has ended"),
}
SECONDS = 9.0
"""After which every other rank has ended, on a busy machine: a rank is silent after 3 s."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[Fault, Future[Run]]]:
    """Three at a time, of those that were asked for: almost all of it is waiting."""
    params = [item.callspec.params for item in request.session.items if item.fspath == request.fspath]
    with ThreadPoolExecutor(3) as pool:
        yield {given["fault"]: pool.submit(run_training, (given["fault"],)) for given in params}


@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_other_ranks_end_with_a_line_that_names_the_rank(
    fault: Fault, runs: dict[Fault, Future[Run]], record_property: Any
) -> None:
    found = runs[fault].result()
    assert str(fault) in found.struck, [seen.lines for seen in found.ranks]
    struck = found.struck[str(fault)]
    others = [seen for rank, seen in enumerate(found.ranks) if rank != fault.rank]
    for seen in others:
        assert f"rank {fault.rank} of the group" in seen.error or f"on rank {fault.rank}" in seen.error, seen
        assert any(words in seen.error for words in WORDS[fault.kind]), seen.error
        assert seen.errs - struck < SECONDS, seen.error
        assert seen.status == 0, "it ended by itself"
    for seen in found.ranks:
        assert all(line["exact"] for line in seen.steps), seen.steps
    if fault.kind in ("exception", "out of memory"):
        assert found.ranks[fault.rank].error, "the rank itself ends, too"
        assert found.ranks[fault.rank].status == 0
    name = fault.kind if fault.kind != "out of memory" else "out of memory, caught, and on to the next batch"
    seconds = max(seen.errs for seen in others) - struck
    record_property("fault", recorded(name, fault.where, fault.rank, told(others[0].error), seconds))


def told(error: str) -> str:
    """An error for the table: its name, and which of the usual words it has."""
    words = [words for those in WORDS.values() for words in those if words in error]
    return f"`{error.partition(':')[0]}`: {words[0].replace('3 s', 'a quarter of the timeout')}"
