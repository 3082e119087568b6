"""Two or four ranks over NCCL: every parallelism trains like one, beside reductions of gradients and pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks import compare
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import FULL, LOCAL, SPREAD, TRAINS, like
from tests.fuzz.frameworks.megatron_draw import MegatronDraw

GPUS = [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)]
LONG = {**TRAINS, "warm": 5, "overlap": True}
"""Our communicator beside those that reduce gradients and gather parameters, long enough to meet in every order."""


def over_nccl(
    sizes: dict[str, int], layout: str, name: str = "plain", offload: bool = False, **how: Any
) -> MegatronDraw:
    """The reference kernel takes float32, so that a wrong order of streams or messages shows and rounding does not."""
    options = {"kernel": "reference", "remat_offload": offload}
    config = FULL | how.pop("config", {})
    return like(name, sizes, layout, "auto", config=config, options=options, **{**TRAINS, **how, "dtype": "float32"})


CASES = [
    *(over_nccl({"cp": cp}, "contiguous", offload=offload) for cp in (2, 4) for offload in (False, True)),
    *(over_nccl({"cp": cp}, "contiguous", **LONG) for cp in (2, 4)),
    over_nccl({"cp": 2}, "boundary"),
    over_nccl({"cp": 2}, "contiguous", **LONG | {"optimizer": "distributed"}),
    over_nccl({"cp": 2, "dp": 2}, "contiguous", **LONG),
    over_nccl({"cp": 2, "dp": 2}, "contiguous", **LONG | {"optimizer": "distributed"}),
    over_nccl({"tp": 2, "cp": 2}, "boundary"),
    over_nccl({"pp": 2, "cp": 2}, "boundary"),
    over_nccl({"pp": 2, "vp": 2, "cp": 2}, "boundary"),
]


def two_layouts(gpus: int, four: dict[str, int], *names: str, **how: Any) -> list[MegatronDraw]:
    """Tokens in order over all GPUs, and Megatron's own over what else four can be."""
    sizes = ({"cp": gpus}, "contiguous"), ({"cp": 2} if gpus == 2 else four, "boundary")
    return [over_nccl(*size, name, **how) for size in sizes for name in names]


def supports(two: str, four: str = "") -> pytest.MarkDecorator:
    """Name the row of the support table, by the number of GPUs; without `four` both are alike."""
    rows = {2: f"2 ranks: {two}", 4: f"4 ranks: {four or two}"}
    return pytest.mark.support("megatron", lambda params: rows[params["gpus"]])


@supports("CP, DDP, distributed optimizer, offload, float32", "CP, TP, PP, VP, DP, distributed optimizer, offload")
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("connections", ["1", "8"])
def test_every_parallelism_over_nccl_trains_like_one_rank(
    gpus: int, connections: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)  # 1 is what Megatron demands on Hopper
    # Pipelines last: Megatron gives the ranks of the first stage a group more, and PyTorch names later groups by how
    # many a rank has, so that ranks of several stages could no longer make one together.
    for pp in (1, 2):
        compare.check(harness.step, [row for row in CASES if (row.ranks, row.pp) == (gpus, pp)], cuda=True)


@supports("packed documents, CP 2", "packed documents, CP 4 and TP 2 x CP 2")
@pytest.mark.parametrize("gpus", GPUS)
def test_packed_documents_over_nccl_train_like_one_rank(gpus: int) -> None:
    rows = two_layouts(gpus, {"tp": 2, "cp": 2}, "packed", "packed mixed")
    compare.check(harness.step, rows, cuda=True)


@supports("fully sharded parameters (FSDP); latent attention")
@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("wrapper", ["torch_fsdp2", "megatron_fsdp:optim_grads_params", "megatron_fsdp:optim_grads"])
def test_sharded_parameters_over_nccl_train_like_one_rank(
    gpus: int, wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # Megatron refuses 1 with them
    how = TRAINS if wrapper == "torch_fsdp2" else {**SPREAD, "overlap": True}
    rows = two_layouts(gpus, {"cp": 2, "dp": 2}, "plain", wrapper=wrapper, config=LOCAL, **how)
    compare.check(harness.step, rows, cuda=True)


@supports("fully sharded parameters (FSDP); latent attention")
@pytest.mark.parametrize("gpus", GPUS)
def test_latent_attention_over_nccl_trains_like_one_rank(gpus: int) -> None:
    sizes = {"cp": 2, "dp": gpus // 2}
    rows = [over_nccl(sizes, layout, name) for name in ("latent", "yarn") for layout in ("contiguous", "boundary")]
    compare.check(harness.step, rows, cuda=True)
