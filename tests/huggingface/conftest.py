"""These tests need transformers, and workers that have imported its models once for all."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.workers import preload

INSTALLED = importlib.util.find_spec("transformers") is not None

if INSTALLED:
    preload(
        "dfa_megatron.huggingface",
        "transformers.trainer",
        *(
            f"transformers.models.{name}.modeling_{name}"
            for name in (
                "gemma",
                "gemma2",
                "gemma3",
                "gemma4",
                "gpt_oss",
                "llama",
                "llama4",
                "mistral",
                "mixtral",
                "phi3",
                "phimoe",
                "qwen2",
                "qwen2_moe",
                "qwen3",
                "qwen3_moe",
            )
        ),
    )


def pytest_runtest_setup() -> None:
    if not INSTALLED:
        pytest.skip("transformers is not installed")
