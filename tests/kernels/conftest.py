"""Memory that nobody has written is NaN in every kernel test, allocated by Python or inside PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from dfa_megatron.testing import memory


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
