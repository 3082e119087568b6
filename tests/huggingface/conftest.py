"""These tests need transformers, and workers that have imported its models once for all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(Path(__file__).parents[2]))  # the worker processes import tests.huggingface.models by name

from dfa_megatron.testing.workers import preload

preload(
    "dfa_megatron.attention",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2", "qwen3")),
)
