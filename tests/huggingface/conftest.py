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
        "tests.fuzz.frameworks.transformers_step",
        *("dfa_megatron.plan.proof.check", "torch._subclasses.schema_check_mode", "torch.profiler._cupti_monitor"),
        *("torch.distributed.algorithms.ddp_comm_hooks", "torch.distributed.fsdp"),
        *(
            f"transformers.models.{name}.modeling_{name}"
            for name in (
                *("bamba", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma4", "gpt2", "gpt_bigcode", "gpt_oss"),
                *("granitemoehybrid", "jamba", "kimi_linear", "lfm2", "llama", "llama4", "mistral", "mixtral"),
                *("nemotron_h", "olmo_hybrid", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5"),
                *("qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "siglip"),
            )
        ),
    )


def pytest_runtest_setup() -> None:
    if not INSTALLED:
        pytest.skip("transformers is not installed")
