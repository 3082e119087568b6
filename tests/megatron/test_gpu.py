"""Two or four ranks over NCCL: every parallelism trains like one, beside reductions of gradients and pipelines.

Among Transformer Engine's modules, with its fp8 and its checkpoint, ours is compared with its own attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from dfa_megatron.config import MegatronConfig
from dfa_megatron.megatron import declare_batch_layout, distribute_attention
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import compare
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import FULL, LOCAL, SPREAD, TRAINS, like
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.support.close import assert_close
from tests.support.workers import run_ranks

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


LAYERS, HEADS, GROUPS, HIDDEN, TOKENS = 2, 8, 2, 512, 1024


def _block(cp: int, dp: int, fp8: str | None, checkpoint: str | None) -> Any:
    """Layers of Transformer Engine's modules, with its attention (checkpoint None) or with ours in it."""
    harness.start(like("plain", {"cp": cp, "dp": dp}))
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        ffn_hidden_size=2 * HIDDEN,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        context_parallel_size=cp,
        cp_comm_type=None if checkpoint is None else "dfa",
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        fp8=fp8,
        fp8_recipe="tensorwise",
        **(full if checkpoint == "auto" else {}),  # type: ignore[arg-type]
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    if checkpoint is not None:
        declare_batch_layout(parallel_state.get_context_parallel_group(), "contiguous")
        spec = distribute_attention(
            spec, config, config=MegatronConfig(data_layout="contiguous", checkpoint=checkpoint)
        )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TransformerBlock(config, spec, post_layer_norm=False, post_process=False, pg_collection=groups).cuda()


def _results(block: Any, hidden: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """out, the gradient of hidden, and the sum over all ranks of the gradients of weights."""
    group = parallel_state.get_context_parallel_group()
    table = RotaryEmbedding(HIDDEN // HEADS, 1.0, rotary_base=10000, cp_group=group)(TOKENS, packed_seq=True)
    hidden = hidden.clone().requires_grad_()
    out = block(hidden, None, rotary_pos_emb=table)
    out.backward(gradient)
    found = {"out": out.detach(), "hidden": hidden.grad}
    for name, parameter in block.named_parameters():
        total = parameter.grad.float()
        dist.all_reduce(total, group=group)
        found[name] = total
    return found


def _equals(rank: int, ranks: int, fp8: str | None, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, gradient = (
        torch.randn(TOKENS, 1, HIDDEN, generator=generator).to("cuda", torch.bfloat16) for _ in range(2)
    )
    plain = _block(1, ranks, fp8, None)
    weights = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    wanted = _results(plain, hidden, gradient)
    rows = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    wanted |= {name: wanted[name][rows] for name in ("out", "hidden")}
    for checkpoint in ("none", "auto"):
        block = _block(ranks, 1, fp8, checkpoint)
        for name, parameter in block.named_parameters():
            parameter.data.copy_(weights[name])
        COUNTERS.reset()
        found = _results(block, hidden[rows], gradient[rows])
        assert COUNTERS.attention_forwards == LAYERS
        assert COUNTERS.reused == (LAYERS if checkpoint == "auto" else 0)
        assert found.keys() == wanted.keys()
        for name, want in wanted.items():
            assert_close(found[name], want, tolerance=tolerance, name=f"{name}, checkpoint {checkpoint}")


@pytest.mark.support("megatron", "Transformer Engine's modules around ours, bfloat16 and fp8; 1 and 2 ranks")
@pytest.mark.parametrize("gpus", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (1, 2)])
@pytest.mark.parametrize(("fp8", "tolerance"), [(None, 2e-2), ("hybrid", 0.15)], ids=["bf16", "fp8"])
def test_among_transformer_engines_modules_it_equals_its_own_attention(
    fp8: str | None, tolerance: float, gpus: int
) -> None:
    pytest.importorskip("transformer_engine.pytorch")
    run_ranks(gpus, _equals, fp8, tolerance, cuda=True, timeout=150)
