"""What `--support-report=FILE` writes: the results that `python -m docs.update FILE` takes in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import support_rows

SWITCHES = ("TRITON_INTERPRET", "DFA_STRESS", "CUDA_VISIBLE_DEVICES")
"""Variables of the environment that choose tests."""
NOTED = ("gpu", "fault", "support", "refuses")
PACKAGES = ("torch", "triton", "flash-attn-4", "megatron-core", "deepspeed", "transformers")


def on_gpu(item: pytest.Item) -> bool:
    """Whether a test computes on a GPU: it is marked so, or `device` among its parameters says so."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("gpu") is not None or parameters.get("device") == "cuda"


def not_drawn(items: list[pytest.Item], most: int, day: str) -> set[pytest.Item]:
    """Return what a day's draw leaves out of the parametrizations of each test and kernel, `most` of which stay.

    Of a test of several GPUs, whose ranks start anew for each, two stay.
    """
    of_test = defaultdict(list)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        of_test[item.nodeid.partition("[")[0], parameters.get("name")].append(item)
    left_out = set[pytest.Item]()
    for key, held in of_test.items():
        stay = 2 if held[0].path.parent.name != "kernels" else most
        left_out.update(random.Random(f"{day} {key}").sample(held, max(0, len(held) - stay)))
    return left_out


def seconds_allowed(item: pytest.Item) -> float:
    """Return the limit of a test that asks for one of its own, else 0."""
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


def by_file(stats: dict[str, list[Any]]) -> Iterator[str]:
    """Yield a line for each file of tests: how many had each outcome, and the seconds of all their phases."""
    outcomes, seconds = defaultdict[str, Counter[str]](Counter), Counter[str]()
    for outcome, reports in stats.items():
        for report in (x for x in reports if isinstance(x, pytest.TestReport)):
            file = report.nodeid.partition("::")[0]
            seconds[file] += report.duration
            if outcome:
                outcomes[file][outcome] += 1
    for file, counts in sorted(outcomes.items()):
        yield f"{seconds[file]:7.1f} s  {file}: {', '.join(f'{count} {name}' for name, count in counts.items())}"


def as_collected(item: pytest.Item) -> dict[str, Any]:
    """The line of a test that does not run."""
    fault = item.get_closest_marker("fault") is not None
    cells = support_rows.cells(item)
    return {"id": item.nodeid, "outcome": "collected", "gpu": on_gpu(item), "fault": fault, "support": cells}


class SupportReport:
    """A line of JSON for the run, then one for each test: its id, its outcome, whether it is for a GPU, and why not.

    Lines are written as they come, so that a run that is ended keeps those it has.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", encoding="utf-8")
        switches = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
        self.write(
            date=datetime.now(UTC).date().isoformat(),
            device=_device(),
            python=platform.python_version(),
            versions={name: version for name in PACKAGES if (version := _version(name))},
            command=" ".join([*switches, "pytest", *_shown()]),
        )

    def write(self, **line: Any) -> None:
        print(json.dumps(line), file=self.file, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items if session.config.option.collectonly else ():
            self.write(**as_collected(item))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
            noted = {name: value for name, value in report.user_properties if name in NOTED}
            line = {"gpu": False, **noted, "reason": reason}
            self.write(id=report.nodeid.partition("@")[0], outcome=report.outcome, **line)  # xdist adds @group

    def pytest_sessionfinish(self) -> None:
        self.file.close()


def _device() -> str:
    """Asked in another process: tests that fork want no CUDA context in this one."""
    if not (count := torch.cuda.device_count()):
        return "CPU"
    code = "import torch; print(torch.cuda.get_device_name())"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"{count} x {name}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _shown() -> list[str]:
    """Without the option itself, whose file is nobody's business later."""
    kept, skip = [], False
    for argument in sys.argv[1:]:
        if not skip and not argument.startswith("--support-report"):
            kept.append(argument)
        skip = argument == "--support-report"
    return kept
