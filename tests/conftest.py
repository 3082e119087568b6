"""Settings of every test run, the fixtures that any test may ask for, and `--support-report` for tables."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; workers inherit it

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron.testing import nan_memory as memory
from dfa_megatron.testing import workers
from tests.support import support_rows

SWITCHES = ("TRITON_INTERPRET", "DFA_STRESS", "CUDA_VISIBLE_DEVICES")
"""Variables of the environment that choose tests."""
NOTED = ("gpu", "fault", "support", "refuses")
PACKAGES = ("torch", "triton", "flash-attn-4", "megatron-core", "deepspeed", "transformers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--support-report", type=Path, metavar="FILE", help="results for docs/update_support.py and update_trust.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    megatron = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    workers.preload("dfa_megatron.attention", *(("megatron.core.parallel_state",) if megatron else ()))
    config.addinivalue_line(
        "markers", "support(table, row, column): a cell of docs/support.md: see tests/support/support_rows.py"
    )
    config.addinivalue_line("markers", "fault: injects a fault, and records what happened for docs/trust.md")
    if config.option.support_report and not hasattr(config, "workerinput"):  # under xdist the controller writes
        config.pluginmanager.register(SupportReport(config.option.support_report))


def on_gpu(item: pytest.Item) -> bool:
    """Whether a test computes on a GPU: it is marked so, or `device` among its parameters says so."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("gpu") is not None or parameters.get("device") == "cuda"


def pytest_itemcollected(item: pytest.Item) -> None:
    if on_gpu(item):
        if item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu(0))  # `-m gpu` takes it; the test itself says what it needs
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one at a time on the GPU: some measure it
        item.user_properties.append(("gpu", True))
    if stands_for := support_rows.cells(item):
        item.user_properties += [("support", stands_for), ("refuses", support_rows.refuses(item))]


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
            fault = item.get_closest_marker("fault") is not None
            cells = support_rows.cells(item)
            self.write(id=item.nodeid, outcome="collected", gpu=on_gpu(item), fault=fault, support=cells)

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


def pytest_runtest_setup(item: pytest.Item) -> None:
    """@pytest.mark.gpu needs one GPU, @pytest.mark.gpu(n) needs n."""
    marker = item.get_closest_marker("gpu")
    if marker is not None and torch.cuda.device_count() < (needed := marker.args[0] if marker.args else 1):
        pytest.skip(f"needs {needed} CUDA devices")


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in this test (not in the processes it starts: there, enter the context manager)."""
    with memory.nan_memory():
        yield
