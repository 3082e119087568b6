"""Makes the example's modules importable, and runs its script as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def script() -> Path:
    return EXAMPLES / "train.py"


@pytest.fixture
def environment() -> dict[str, str]:
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return {**os.environ, **own, "TORCHDYNAMO_DISABLE": "1"}  # nothing is compiled: ranks start in half the time


@pytest.fixture
def run(script: Path, environment: dict[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the example to its end in an empty folder."""

    def to_the_end(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
        )

    return to_the_end
