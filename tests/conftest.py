"""Settings of every test run, the fixtures that any test may ask for, and `--support-report` for tables."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; workers inherit it
# PyTorch's store looks up the name of each connection in its only thread. A lost query would stop it for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron.kernels.triton.support import interpreted
from tests.support import nan_memory as memory
from tests.support import reached, support_rows, workers
from tests.support.report import SupportReport, as_collected, by_file, not_drawn, on_gpu, seconds_allowed

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""Every test that was collected, also those that are left out of this run."""


TOGETHER = {"tests/faults/test_ends.py", "tests/faults/test_goes_on.py"}
"""Files whose fixtures run for all their tests: on one worker of pytest-xdist, or every worker would run them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support-report", type=Path, metavar="FILE", help="results for `python -m docs.update FILE`")
    parser.addoption(
        "--drawn", type=int, metavar="N", help="of each test of a kernel on a GPU N cases, drawn by the day"
    )
    parser.addoption("--by-file", action="store_true", help="a line for each file at the end")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    if not torch.cuda.device_count():
        workers.seed_the_cpu_alone()
    # pytest is half of what a rank of a short test would import: its test's module needs it.
    workers.preload("pytest", "dfa_megatron.attention", *([reached.__name__] if reached.VARIABLE in os.environ else ()))
    config.addinivalue_line(
        "markers", "support(table, row, column): a cell of docs/support.md: see tests/support/support_rows.py"
    )
    config.addinivalue_line("markers", "fault: injects a fault, and records what happened for docs/trust.md")
    if config.option.support_report and not hasattr(config, "workerinput"):  # under xdist the controller writes
        config.pluginmanager.register(SupportReport(config.option.support_report))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup`, and the files of `TOGETHER` as groups: xdist 3.8 finds no markers with pytest 9.2."""
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.option.dist == "loadgroup" else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if on_gpu(item):
        if item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu(0))  # `-m gpu` takes it; the test itself says what it needs
        if item.path.parent.name != "kernels":
            name = getattr(item, "originalname", item.name)
            item.add_marker(pytest.mark.xdist_group(f"gpu {item.path.stem} {name}"))  # its own ranks share the GPUs
        item.user_properties.append(("gpu", True))
    if stands_for := support_rows.cells(item):
        item.user_properties += [("support", stands_for), ("refuses", support_rows.refuses(item))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none, unless it is asked for: thousands of skips take a minute."""
    config.stash[COLLECTED] = list(items)
    if most := config.option.drawn:
        left_out = not_drawn([item for item in items if on_gpu(item)], most, date.today().isoformat())
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
        items.sort(key=seconds_allowed, reverse=True)  # what compiles for minutes starts first
    asked_for = config.option.markexpr or config.option.collectonly or config.option.support_report
    if asked_for or torch.cuda.device_count():
        return
    left_out = [item for item in items if on_gpu(item)]
    items[:] = [item for item in items if not on_gpu(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """@pytest.mark.gpu needs a GPU. With a number, as many ranks have one each or share one.

    With `apart=True` or over copy engines each has its own.
    """
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    ranks, params = marker.args[0] if marker.args else 1, getattr(item, "callspec", None)
    apart = marker.kwargs.get("apart") or (params and params.params.get("transport") == "copy_engine")
    if torch.cuda.device_count() < (needed := ranks if apart else min(ranks, 1)):
        pytest.skip(f"needs {needed} CUDA devices")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.by_file:
        terminalreporter.section("by file")
        for line in by_file(terminalreporter.stats):
            terminalreporter.write_line(line)


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """Uninitialised memory is NaN in this test (not in the processes it starts: there, enter the context manager)."""
    with memory.nan_memory():
        yield


@pytest.fixture(scope="session")
def every_test(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `--collect-only --support-report` writes of every test; this run's own tests where it collected them all."""
    config, tests = request.config, request.config.rootpath / "tests"
    if [config.rootpath / path for path in config.args] == [tests] and not interpreted():
        return [as_collected(item) for item in config.stash[COLLECTED]]
    report = tmp_path_factory.mktemp("collected") / "report.jsonl"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["--support-report", str(report), str(tests)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command, cwd=config.rootpath, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()[1:]]
