"""The reference run that every parallel run is compared with: Megatron-Core's own attention on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from tests.megatron import harness, kinds
from tests.support.workers import preload, run_ranks

# Importing a GPT model takes seconds: once in the fork server, not in every rank of every test.
preload("megatron.core.parallel_state", "megatron.core.models.gpt.gpt_model", "megatron.core.distributed")
preload("megatron.core.ssm.mamba_layer", "megatron.core.ssm.mamba_mixer", "megatron.core.models.mamba.mamba_model")
preload("megatron.core.models.gpt.gpt_layer_specs", "dfa_megatron.megatron.spec", "dfa_megatron.megatron.tokens.batch")


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker processes of tests that are not for GPUs see none."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Give the paths of the losses and first gradients of one rank, by their names in kinds.py; each is made once."""
    folder = tmp_path_factory.mktemp("references")

    def made(*names: str) -> dict[str, str]:
        paths = {name: str(folder / f"{name}.pt") for name in names}
        missing = [(path, kinds.REFERENCES[name]) for name, path in paths.items() if not Path(path).exists()]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CUDA_VISIBLE_DEVICES", "")
            if missing:
                run_ranks(1, harness.save_references, missing, timeout=170)
        return paths

    return made


@pytest.fixture(scope="session")
def reference(references: Callable[..., dict[str, str]]) -> str:
    """The path of the plain model's."""
    return references("plain")["plain"]
