"""These tests need DeepSpeed and transformers, on CPU, in workers that have imported both once for all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# DeepSpeed chooses its device and compiles nothing where these are set before it is imported; workers inherit them.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[2]))  # the worker processes import tests.deepspeed.harness by name

from dfa_megatron.testing.workers import preload

preload(
    "dfa_megatron.attention",
    "deepspeed",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")),
)
