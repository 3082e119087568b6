"""Draws where the time of a short call and of a pack goes, as they stand and replayed: host, launches and streams.

    python -m benchmarks.trace_picture --out trace.json                      # one GPU: a program of --ranks ranks
    torchrun --nproc-per-node 2 -m benchmarks.trace_picture --out trace.json # the calls of real ranks, drawn for rank 0
    python -m benchmarks.trace_picture --device cpu --kernel cpu --rows 32 --heads 4 --kv-heads 2 --head-dim 16

The file has every event of one forward and backward: start and duration in microseconds, and its name. A picture is
drawn beside it where matplotlib is installed. The gradients of real ranks must be the same both ways. The profiler
makes the host slower: host_time.py has its times.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import host_time, pack_programs
from benchmarks.documents import draw_documents, log_normal
from dfa_megatron import DistAttentionConfig, dist_flash_attn_varlen_func
from dfa_megatron.doctor.machine import machine
from dfa_megatron.doctor.world import World, join
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.runtime.hooks import hooked

MARK = "one call"
LANES = {
    "cpu_op": "operations", "cuda_runtime": "launches", "cuda_driver": "launches", "kernel": "", "gpu_memcpy": "",
    "gpu_memset": "",
}  # fmt: skip
"""The profiler's categories, and the lane of each on its thread; those without one are on their stream."""
COLORS = {"operations": "tab:green", "launches": "tab:red", "kernel": "tab:blue", "copy": "tab:orange"}

Event = tuple[float, float, str]


@dataclass(frozen=True)
class Shapes:
    """What is traced."""

    device: str = flag("cuda" if torch.cuda.is_available() else "cpu", "where", choices=("cuda", "cpu"))
    kernel: str = flag("auto", "as in the options")
    ranks: int = flag(2, "of the programs, where one rank runs alone")
    rows: int = flag(4096, "of each rank")
    heads: int = flag(32, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    mean: float = flag(6.0, "of the logarithm of a document's tokens")
    out: Path | None = flag(None, "the timelines as JSON; the picture has its name and .png")


def main(argv: Sequence[str] | None = None) -> None:
    """Trace every case both ways, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, Shapes)
    shapes = from_flags(Shapes, parser.parse_args(argv))
    world = join(shapes.device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(shapes), "timelines": []}
    for case, call in cases(shapes, world).items():
        if world is not None:
            check(call)
        for way in ("as it stands", "replayed"):
            with hooked(host_time.AsItStands()) if way == "as it stands" else nullcontext():
                report["timelines"].append({"case": case, "way": way, **timeline(call, shapes, world)})
            if world is None or world.rank == 0:
                write(report, shapes.out)
    if world is None or world.rank == 0:
        draw(report, shapes.out)
    if world is not None:
        world.leave()


def cases(shapes: Shapes, world: World | None) -> dict[str, Callable[[], object]]:
    """Return a forward and backward of a short call and of a pack."""
    same = {name: getattr(shapes, name) for name in ("device", "kernel", "heads", "kv_heads", "head_dim")}
    dtype = "bfloat16" if shapes.device == "cuda" else "float32"
    short = host_time.Shapes(rows=shapes.rows, dtype=dtype, **same)
    pack = pack_programs.Shapes(tokens_per_rank=shapes.rows, **same)
    ranks = shapes.ranks if world is None else world.size
    offsets = draw_documents(ranks * shapes.rows, 2 * ranks, 0, log_normal(shapes.mean, 1.2))
    if world is None:
        prepared = pack_programs.program(pack, offsets, ranks, 0)
        both = torch.no_grad()(pack_programs.both_phases(*prepared))
        return {"short call": host_time.program(short, ranks), "pack": both}
    q, k, v, dout = (x[0] for x in pack_programs.draw(pack, shapes.rows))
    leaves, config = [x.requires_grad_() for x in (q, k, v)], DistAttentionConfig(kernel=shapes.kernel)

    def packed() -> object:
        out: Any = dist_flash_attn_varlen_func(*leaves, offsets, causal=True, config=config)
        return torch.autograd.grad(out, leaves, dout)

    return {"short call": host_time.public(short), "pack": packed}


def check(call: Callable[[], Any]) -> None:
    """Raise an error if replayed gradients are not those of the call as it stands; a program alone has noise."""
    with hooked(host_time.AsItStands()):
        want = call()
    for _ in range(3):
        found = call()
    far = [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, want, strict=True)]
    if not max(far) < 1e-2:
        raise RuntimeError(f"replayed gradients differ by {far} of their norm")


def timeline(call: Callable[[], object], shapes: Shapes, world: World | None) -> dict[str, Any]:
    """Return one call's lanes of events, and its milliseconds on the host and in all."""
    cuda = shapes.device == "cuda"
    for _ in range(5):
        call()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    for _ in range(2):  # what the profiler makes once is made in the first
        if cuda:
            torch.cuda.synchronize()
        with profile(activities=activities) as profiled:
            if world is not None:
                dist.barrier(world.side)
            with record_function(MARK):
                call()
            if cuda:
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return lanes_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def lanes_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the events of the call by lane: each thread's innermost operations and launches, each stream's work."""
    call = next(event for event in events if event.get("name") == MARK and event.get("cat") == "user_annotation")
    begin, end = call["ts"], call["ts"] + call["dur"]
    found: dict[str, list[Event]] = {}
    threads: dict[Any, str] = {call["tid"]: "host"}
    for event in sorted((e for e in events if e.get("cat") in LANES), key=lambda e: (e["ts"], -e.get("dur", 0))):
        kind, start = LANES[event["cat"]], round(event["ts"] - begin, 2)
        if start < 0 or (kind and event["ts"] > end):
            continue
        thread = threads.setdefault(event["tid"], f"thread {len(threads) + 1}") if kind else ""
        lane = found.setdefault(f"{thread}: {kind}" if kind else f"stream {event['tid']}", [])
        if kind and lane and start < lane[-1][0] + lane[-1][1]:
            lane.pop()  # it is made of this one, and perhaps of more
        lane.append((start, round(event.get("dur", 0), 2), short(event["name"])))
    last = max((start + took for lane in found.values() for start, took, _ in lane), default=0.0)
    device = [took for name, lane in found.items() if name.startswith("stream") for _, took, _ in lane]
    return {
        "host_ms": round((end - begin) / 1e3, 4),
        "all_ms": round(max(last, end - begin) / 1e3, 4),
        "device_busy_ms": round(sum(device) / 1e3, 4),
        "lanes": found,
    }


def short(name: str) -> str:
    """Return a kernel's name without its types."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:60]


def write(report: dict[str, Any], out: Path | None) -> None:
    """Print the newest timeline's figures, and write all."""
    newest = report["timelines"][-1]
    counts = {name: len(lane) for name, lane in newest["lanes"].items()}
    print({**{key: value for key, value in newest.items() if key != "lanes"}, "events": counts}, flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, default=str, separators=(",", ":")) + "\n", encoding="utf-8")


def draw(report: dict[str, Any], out: Path | None) -> None:
    """Draw each case in a column, as it stands above and replayed below, with one scale."""
    if out is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed", flush=True)
        return
    lines = report["timelines"]
    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots(2, len(lines) // 2, squeeze=False, sharex="col").T.flat
    for line, ax in zip(lines, axes, strict=True):
        lanes = dict(sorted(line["lanes"].items()))
        launched = {name: events for name, events in lanes.items() if "operations" not in name} or lanes
        begin = min(start for events in launched.values() for start, *_ in events)
        for height, (name, events) in enumerate(lanes.items()):
            for kind, color in COLORS.items():
                spans = [(start - begin, took) for start, took, event in events if kind_of(name, event) == kind]
                ax.broken_barh(spans, (height - 0.4, 0.8), facecolors=color)
        ax.set_yticks(range(len(lanes)), list(lanes))
        ax.invert_yaxis()
        ax.set_title(f"{line['case']}, {line['way']}", fontsize=10)
        ax.set_xlim(left=-200)
        ax.set_xlabel("microseconds from the first launch, under the profiler")
    figure.savefig(out.with_suffix(".png"), dpi=110)


def kind_of(lane: str, event: str) -> str:
    """Return the key of an event's color."""
    if not lane.startswith("stream"):
        return lane.partition(": ")[2]
    return "copy" if event.startswith(("Memcpy", "Memset", "nccl")) else "kernel"


if __name__ == "__main__":
    main()
