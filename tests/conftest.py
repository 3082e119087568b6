"""Settings of every test run, and the fixtures that any test may ask for."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; workers inherit it

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from dfa_megatron.testing import memory, workers


def pytest_configure() -> None:
    torch.set_num_threads(1)
    megatron = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    workers.preload("dfa_megatron.attention", *(("megatron.core.parallel_state",) if megatron else ()))


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
