"""Two or four ranks over NCCL: every parallelism trains like one, beside reductions of gradients and pipelines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dfa_megatron.config import MegatronConfig
from tests.megatron import harness
from tests.megatron.harness import Case, Topology
from tests.megatron.kinds import FULL, LOCAL, REFERENCES, expected
from tests.support.workers import run_ranks

GPUS = [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)]
CASES: list[tuple[Topology, Case]] = []


def add(topology: Topology, steps: int = 3, layout: str = "contiguous", offload: bool = False, **more: Any) -> None:
    # The reference kernel takes float32, so that a wrong order of streams or messages shows and rounding does not.
    options = MegatronConfig(data_layout=layout, kernel="reference", remat_offload=offload)
    CASES.append((topology, Case(options, recompute=FULL, steps=steps, **more)))


for cp in (2, 4):
    add(Topology(cp=cp))
    add(Topology(cp=cp), offload=True)
    # Our communicator beside those that reduce gradients and gather parameters, long enough to meet in every order.
    add(Topology(cp=cp), steps=harness.STEPS, overlap=True)
add(Topology(cp=2), layout="boundary")
add(Topology(cp=2), steps=harness.STEPS, overlap=True, optimizer="distributed")
add(Topology(cp=2, dp=2), steps=harness.STEPS, overlap=True)
add(Topology(cp=2, dp=2), steps=harness.STEPS, overlap=True, optimizer="distributed")
add(Topology(tp=2, cp=2), layout="boundary")
# Pipelines last: Megatron gives the ranks of the first stage a group more, and PyTorch names later groups by how many
# a rank has, so that ranks of several stages could no longer make one together.
add(Topology(pp=2, cp=2), layout="boundary")
add(Topology(pp=2, vp=2, cp=2), layout="boundary")


def two_layouts(gpus: int, four: Topology) -> tuple[tuple[Topology, str], ...]:
    """Tokens in order over all GPUs, and Megatron's own over what else four can be."""
    return (Topology(cp=gpus), "contiguous"), (Topology(cp=2) if gpus == 2 else four, "boundary")


def supports(two: str, four: str = "") -> pytest.MarkDecorator:
    """Name the row of the support table, by the number of GPUs; without `four` both are alike."""
    rows = {2: f"2 ranks: {two}", 4: f"4 ranks: {four or two}"}
    return pytest.mark.support("megatron", lambda params: rows[params["gpus"]])


@supports("CP, DDP, distributed optimizer, offload, float32", "CP, TP, PP, VP, DP, distributed optimizer, offload")
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("connections", ["1", "8"])
def test_every_parallelism_over_nccl_trains_like_one_rank(
    gpus: int, reference: str, connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)  # 1 is what Megatron demands on Hopper
    cases = [(topology, wanted) for topology, wanted in CASES if topology.ranks == gpus]
    prepared = [(topology, wanted, expected(topology, wanted), reference) for topology, wanted in cases]
    run_ranks(gpus, harness.check_topologies, prepared, timeout=170, cuda=True)


@supports("packed documents, CP 2", "packed documents, CP 4 and TP 2 x CP 2")
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("how", ["packed", "packed mixed"])
def test_packed_documents_over_nccl_train_like_one_rank(
    gpus: int, how: str, references: Callable[..., dict[str, str]]
) -> None:
    prepared = []
    for topology, layout in two_layouts(gpus, Topology(tp=2, cp=2)):
        options = MegatronConfig(data_layout=layout, kernel="reference")
        wanted = replace(REFERENCES[how], options=options, recompute=FULL)
        prepared.append((topology, wanted, expected(topology, wanted), references(how)[how]))
    run_ranks(gpus, harness.check_topologies, prepared, timeout=170, cuda=True)


@supports("fully sharded parameters (FSDP); latent attention")
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("wrapper", ["torch_fsdp2", "megatron_fsdp:optim_grads_params", "megatron_fsdp:optim_grads"])
def test_sharded_parameters_over_nccl_train_like_one_rank(
    gpus: int, reference: str, wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # Megatron refuses 1 with them
    wrapped: dict[str, Any] = {"wrapper": wrapper, "config": LOCAL, "steps": 3}
    if wrapper != "torch_fsdp2":
        wrapped |= {"optimizer": "distributed", "overlap": True}
    prepared = []
    for topology, layout in two_layouts(gpus, Topology(cp=2, dp=2)):
        wanted = Case(MegatronConfig(data_layout=layout, kernel="reference"), recompute=FULL, **wrapped)
        prepared.append((topology, wanted, expected(topology, wanted), reference))
    run_ranks(gpus, harness.check_topologies, prepared, timeout=170, cuda=True)


@supports("fully sharded parameters (FSDP); latent attention")
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("kind", ["latent", "yarn"])
def test_latent_attention_over_nccl_trains_like_one_rank(
    gpus: int, kind: str, references: Callable[..., dict[str, str]]
) -> None:
    prepared = []
    for layout in ("contiguous", "boundary"):
        topology = Topology(cp=2, dp=gpus // 2)
        options = MegatronConfig(data_layout=layout, kernel="reference")
        wanted = replace(REFERENCES[kind], options=options, recompute=FULL)
        prepared.append((topology, wanted, expected(topology, wanted), references(kind)[kind]))
    run_ranks(gpus, harness.check_topologies, prepared, timeout=170, cuda=True)
