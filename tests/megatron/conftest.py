"""The reference run that every parallel run is compared with: Megatron-Core's own attention on one rank."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from tests.megatron import harness
from tests.support.workers import preload, run_ranks

# Importing a GPT model takes seconds: once in the fork server, not in every rank of every test.
preload("megatron.core.parallel_state", "megatron.core.models.gpt.gpt_model", "megatron.core.distributed")
preload("megatron.core.ssm.mamba_layer", "megatron.core.ssm.mamba_mixer", "megatron.core.models.mamba.mamba_model")


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker processes of tests that are not for GPUs see none."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of the losses and first gradients of one rank with Megatron's own attention."""
    path = str(tmp_path_factory.mktemp("megatron") / "reference.pt")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        run_ranks(1, harness.save_reference, path, timeout=120)
    return path
