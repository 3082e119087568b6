"""A simulated run as a Chrome trace: one process per rank with a row for compute and one per direction of its link."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dfa_megatron.plan.cost import Timeline
from dfa_megatron.plan.ir import Plan

ROWS = {"compute": 0, "wait": 0, "send": 1, "receive": 2}


def trace(title: str, timelines: Sequence[tuple[Plan, Timeline]]) -> str:
    """JSON in the trace event format (complete events, microseconds); the phases follow one another."""
    events: list[dict[str, Any]] = []
    for rank in range(timelines[0][0].ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events += [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
            for name, row in (("compute", 0), ("send", 1), ("receive", 2))
        ]
    late = 0.0
    for _, timeline in timelines:
        for event in timeline.events:
            arguments = {"phase": event.phase, "step": event.step}
            if event.peer >= 0:
                arguments |= {"peer": event.peer, "bytes": event.nbytes}
            events.append(
                {
                    "name": event.label,
                    "cat": f"{event.phase},{event.kind}",
                    "ph": "X",
                    "pid": event.rank,
                    "tid": ROWS[event.kind],
                    "ts": 1e6 * (late + event.start),
                    "dur": 1e6 * (event.end - event.start),
                    "args": arguments,
                }
            )
        late += timeline.makespan
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"plan": title}, "traceEvents": events}, indent=1)
