"""Memory that nobody has written is NaN in every kernel test; under xdist a compiled kernel is one worker's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from dfa_megatron.plan.language.geometry import Segment
from tests.support import nan_memory as memory

SLOW_TO_COMPILE = ("flash4", "triton")
"""Their tests go early, so that no worker is left with one at the end."""


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group for each kernel that a test compiles, for `pytest -n 12 --dist loadgroup`.

    In Triton's interpreter DFA_HALF=0 or 1 takes every second test.
    """
    if (half := os.environ.get("DFA_HALF")) and os.environ.get("TRITON_INTERPRET") == "1":
        items[:] = items[int(half) :: 2]
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("device") == "cuda" and "name" in parameters:
            item.add_marker(pytest.mark.xdist_group(_compiled(parameters)))
    items.sort(key=_late)


def _late(item: pytest.Item) -> int:
    """Order tests by how long their group takes: Megatron's trainings, then what compiles slowly."""
    if item.path.parent.name == "megatron":
        return 0
    return 1 if any(f"{name} on cuda" in item.name for name in SLOW_TO_COMPILE) else 2


def _compiled(parameters: dict[str, Any]) -> str:
    """Equal for tests that run the same compiled kernels, as far as flash-attn-4 and Triton tell them apart."""
    words = [parameters["name"], parameters.get("dtype", torch.bfloat16), parameters.get("rows")]
    if case := parameters.get("case"):
        tile = Segment(0, case.q_len, 0, case.kv_len, case.band).tile.shrink()
        bounds = None if tile is None else (tile.band.left < 0, tile.band.right < 0, tile.band.right == 0)
        words += [case.head_dim, case.head_dim_v, case.heads // case.kv_heads, bounds]
    return "-".join(map(str, words))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """PyTorch fills what its C++ code allocates while deterministic algorithms are on; "warn" refuses no algorithm."""
    before = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determinis.*")
        torch.set_deterministic_debug_mode("warn")
        try:
            with memory.nan_memory():
                yield
        finally:
            torch.set_deterministic_debug_mode(before)
            torch.utils.deterministic.fill_uninitialized_memory = fill
