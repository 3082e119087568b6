"""These tests need DeepSpeed and transformers, on CPU, in workers that have imported both once for all."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.support.workers import preload

MISSING = [
    name for name in ("deepspeed", "transformers", "accelerate", "peft") if importlib.util.find_spec(name) is None
]

if not MISSING:
    # DeepSpeed chooses its device when it is imported; workers inherit the variable.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    preload(
        "dfa_megatron.huggingface",
        "dfa_megatron.deepspeed",
        "deepspeed",
        "tests.fuzz.frameworks.deepspeed_step",
        *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")),
    )
    # What the first engine of a rank imports otherwise, for three seconds.
    preload("torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "torch._dynamo.repro.after_aot")
    preload("torch.ao.quantization", "deepspeed.runtime.zero.stage3", "deepspeed.runtime.zero.stage_1_and_2")
    preload("deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.module_inject.auto_ep_layer")
    preload("deepspeed.comm.mori", "deepspeed.ops.triton_ops", "deepspeed.utils.pin_memory")
    preload("deepspeed.runtime.zero.muon.muon_optimizer", "distutils.ccompiler")


def pytest_runtest_setup() -> None:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
