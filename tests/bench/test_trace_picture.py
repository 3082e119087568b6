"""The picture of a call's time: what is in its lanes, and that it is drawn."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from benchmarks import trace_picture


def event(cat: str, name: str, start: float, took: float, tid: Any = 1) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": start, "dur": took, "tid": tid}


def test_lanes_hold_innermost_operations_launches_and_the_work_of_streams() -> None:
    events = [
        event("cpu_op", "before", 50, 9),
        event("user_annotation", trace_picture.MARK, 100, 40),
        event("cpu_op", "outer", 101, 30),
        event("cpu_op", "inner", 102, 5),
        event("cuda_runtime", "cudaLaunchKernel", 103, 2),
        event("cpu_op", "alone", 135, 3),
        event("cpu_op", "of the backward", 110, 3, tid=2),
        event("kernel", "void attend<bf16, 128>(int*)", 120, 30, tid=7),
        event("gpu_memcpy", "Memcpy PtoP", 121, 8, tid=13),
        event("cuda_runtime", "cudaDeviceSynchronize", 145, 9),
        {"name": "process_name", "ph": "M"},
    ]
    found = trace_picture.lanes_of(events)
    assert found["lanes"] == {
        "host: operations": [(2, 5, "inner"), (35, 3, "alone")],
        "host: launches": [(3, 2, "cudaLaunchKernel")],
        "thread 2: operations": [(10, 3, "of the backward")],
        "stream 7": [(20, 30, "attend")],
        "stream 13": [(21, 8, "Memcpy PtoP")],
    }
    assert (found["host_ms"], found["all_ms"], found["device_busy_ms"]) == (0.04, 0.05, 0.038)
    assert [trace_picture.kind_of("stream 13", name) for name in ("Memcpy PtoP", "attend")] == ["copy", "kernel"]


def test_a_call_and_a_pack_are_traced_both_ways_and_drawn(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "trace.json"
    sizes = ["--rows", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--mean", "3"]
    trace_picture.main(["--device", "cpu", "--kernel", "cpu", *sizes, "--out", str(out)])
    lines = json.loads(out.read_text())["timelines"]
    assert [(line["case"], line["way"]) for line in lines] == [
        (case, way) for case in ("short call", "pack") for way in ("as it stands", "replayed")
    ]
    counts = [sum(map(len, line["lanes"].values())) for line in lines]
    assert counts[0] > counts[1] > 0
    assert counts[2] > counts[3] > 0
    assert out.with_suffix(".png").exists() == (importlib.util.find_spec("matplotlib") is not None)
