"""Settings of every test run, the fixtures that any test may ask for, and `--support-report` for tables."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; workers inherit it

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dfa_megatron.testing import nan_memory as memory
from dfa_megatron.testing import workers
from tests.support import support_rows
from tests.support.report import SupportReport, on_gpu


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--support-report", type=Path, metavar="FILE", help="results for `python -m docs.update FILE`")


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


def pytest_itemcollected(item: pytest.Item) -> None:
    if on_gpu(item):
        if item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu(0))  # `-m gpu` takes it; the test itself says what it needs
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one at a time on the GPU: some measure it
        item.user_properties.append(("gpu", True))
    if stands_for := support_rows.cells(item):
        item.user_properties += [("support", stands_for), ("refuses", support_rows.refuses(item))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none, unless it is asked for: thousands of skips take a minute."""
    asked_for = config.option.markexpr or config.option.collectonly or config.option.support_report
    if asked_for or torch.cuda.device_count():
        return
    left_out = [item for item in items if on_gpu(item)]
    items[:] = [item for item in items if not on_gpu(item)]
    config.hook.pytest_deselected(items=left_out)


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
