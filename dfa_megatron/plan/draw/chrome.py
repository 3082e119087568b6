"""Write runs as a Chrome trace: one process per rank with a row for compute and one per direction of its link."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dfa_megatron.plan.cost.simulate import Timeline
from dfa_megatron.plan.language.ir import Plan

ROWS = {"compute": 0, "wait": 0, "send": 1, "receive": 2}


Phases = Sequence[tuple[Plan, Timeline]]


def trace(title: str, timelines: Phases, measured: Phases = ()) -> str:
    """Return JSON in the trace event format (complete events, microseconds); the phases follow one another.

    `measured` is the same run as measured: each rank's rows come below the rows of its simulation.
    """
    events: list[dict[str, Any]] = []
    for nth, (kind, phases) in enumerate((("simulated", timelines), ("measured", measured))):
        if phases:
            events += _events(phases, nth, 2 if measured else 1, f", {kind}" if measured else "")
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"plan": title}, "traceEvents": events}, indent=1)


def _events(timelines: Phases, first: int, stride: int, kind: str) -> Iterator[dict[str, Any]]:
    for rank in range(timelines[0][0].ranks):
        process = {"ph": "M", "pid": first + stride * rank}
        yield process | {"name": "process_name", "tid": 0, "args": {"name": f"rank {rank}{kind}"}}
        for name, row in (("compute", 0), ("send", 1), ("receive", 2)):
            yield process | {"name": "thread_name", "tid": row, "args": {"name": name}}
    late = 0.0
    for _, timeline in timelines:
        for event in timeline.events:
            arguments = {"phase": event.phase, "step": event.step}
            if event.peer >= 0:
                arguments |= {"peer": event.peer, "bytes": event.nbytes}
            yield {
                "name": event.label,
                "cat": f"{event.phase},{event.kind}",
                "ph": "X",
                "pid": first + stride * event.rank,
                "tid": ROWS[event.kind],
                "ts": 1e6 * (late + event.start),
                "dur": 1e6 * (event.end - event.start),
                "args": arguments,
            }
        late += timeline.makespan
