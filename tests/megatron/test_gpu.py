"""Four GPUs over NCCL: every parallelism trains like one rank, beside the reductions of gradients and pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness
from tests.megatron.harness import Case, Topology
from tests.megatron.test_latent import LATENT, YARN
from tests.megatron.test_packed import REFERENCES
from tests.megatron.test_parity import FULL, expected
from tests.megatron.test_sharded import LOCAL

CASES: list[tuple[Topology, Case]] = []


def add(topology: Topology, steps: int = 3, layout: str = "contiguous", offload: bool = False, **more: Any) -> None:
    # The reference kernel takes float32, so that a wrong order of streams or messages shows and rounding does not.
    options = DistAttentionConfig(layout=layout, kernel="reference", remat_offload=offload)
    CASES.append((topology, Case(options, recompute=FULL, steps=steps, **more)))


add(Topology(cp=4))
add(Topology(cp=4), offload=True)
# Our communicator beside those that reduce gradients and gather parameters, for long enough to meet in every order.
add(Topology(cp=4), steps=harness.STEPS, overlap=True)
add(Topology(cp=2, dp=2), steps=harness.STEPS, overlap=True)
add(Topology(cp=2, dp=2), steps=harness.STEPS, overlap=True, optimizer="distributed")
add(Topology(tp=2, cp=2), layout="boundary")
# Pipelines last: Megatron gives the ranks of the first stage a group more, and PyTorch names later groups by how many
# a rank has, so that ranks of several stages could no longer make one together.
add(Topology(pp=2, cp=2), layout="boundary")
add(Topology(pp=2, vp=2, cp=2), layout="boundary")


@pytest.mark.gpu(4)
@pytest.mark.parametrize("connections", ["1", "8"])
def test_every_parallelism_over_nccl_trains_like_one_rank(
    reference: str, connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)  # 1 is what Megatron demands on Hopper
    prepared = [(topology, wanted, expected(topology, wanted), reference) for topology, wanted in CASES]
    run_ranks(4, harness.check_topologies, prepared, timeout=170, cuda=True)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("how", ["packed", "packed-mixed"])
def test_packed_documents_over_nccl_train_like_one_rank(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "packed.pt")
    with monkeypatch.context() as on_cpu:
        on_cpu.setenv("CUDA_VISIBLE_DEVICES", "")
        run_ranks(1, harness.save_reference, path, Case(options=None, steps=3, **REFERENCES[how]), timeout=120)
    prepared = []
    for topology, layout in ((Topology(cp=4), "contiguous"), (Topology(tp=2, cp=2), "boundary")):
        options = DistAttentionConfig(layout=layout, kernel="reference")
        wanted = Case(options, recompute=FULL, steps=3, **REFERENCES[how])
        prepared.append((topology, wanted, expected(topology, wanted), path))
    run_ranks(4, harness.check_topologies, prepared, timeout=170, cuda=True)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("wrapper", ["torch_fsdp2", "megatron_fsdp:optim_grads_params", "megatron_fsdp:optim_grads"])
def test_sharded_parameters_over_nccl_train_like_one_rank(
    reference: str, wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # Megatron refuses 1 with them
    wrapped: dict[str, Any] = {"wrapper": wrapper, "config": LOCAL, "steps": 3}
    if wrapper != "torch_fsdp2":
        wrapped |= {"optimizer": "distributed", "overlap": True}
    prepared = []
    for topology, layout in ((Topology(cp=4), "contiguous"), (Topology(cp=2, dp=2), "boundary")):
        wanted = Case(DistAttentionConfig(layout=layout, kernel="reference"), recompute=FULL, **wrapped)
        prepared.append((topology, wanted, expected(topology, wanted), reference))
    run_ranks(4, harness.check_topologies, prepared, timeout=170, cuda=True)


@pytest.mark.gpu(4)
@pytest.mark.parametrize("config", [LATENT, YARN], ids=["rope", "yarn"])
def test_latent_attention_over_nccl_trains_like_one_rank(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "latent.pt")
    with monkeypatch.context() as on_cpu:
        on_cpu.setenv("CUDA_VISIBLE_DEVICES", "")
        run_ranks(1, harness.save_reference, path, Case(options=None, steps=3, config=config), timeout=120)
    prepared = []
    for topology, layout in ((Topology(cp=2, dp=2), "contiguous"), (Topology(cp=2, dp=2), "boundary")):
        options = DistAttentionConfig(layout=layout, kernel="reference")
        wanted = Case(options, recompute=FULL, steps=3, config=config)
        prepared.append((topology, wanted, expected(topology, wanted), path))
    run_ranks(4, harness.check_topologies, prepared, timeout=170, cuda=True)
