"""Every test of rematerialization starts with fresh counts and a clean thread."""

from __future__ import annotations

import pytest

from dfa_megatron import remat
from dfa_megatron.runtime.counters import COUNTERS
from tests.remat.regions import Attention


@pytest.fixture(autouse=True)
def fresh_counts() -> None:
    """Counts of this test only, and a clean thread after it."""
    Attention.ran = 0
    COUNTERS.reset()
    assert remat.active_frame() is None
