"""What takes long to import is imported once; worker processes of tests that are not for GPUs see none."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from tests.support.workers import preload

preload("megatron.core.parallel_state", "megatron.core.models.gpt.gpt_model", "megatron.core.distributed")
preload("megatron.core.ssm.mamba_layer", "megatron.core.ssm.mamba_mixer", "megatron.core.models.mamba.mamba_model")
preload("megatron.core.ssm.gated_delta_net", "megatron.core.models.gpt.gpt_layer_specs", "dfa_megatron.megatron.spec")
preload("tests.frameworks.megatron_harness")
# What the first step of a rank imports otherwise, for more than a second; some of it is not in every release.
preload("megatron.training.training", "megatron.core.models.mimo", "torch._subclasses.schema_check_mode")
preload("torch.profiler._cupti_monitor", "dfa_megatron.plan.proof.check", "dfa_megatron.megatron.stand_in")


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker processes of tests that are not for GPUs see none."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
