"""Ours among Transformer Engine's modules, with its fp8 and its checkpoint, against its own attention; on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.support.close import assert_close
from tests.support.workers import run_ranks

LAYERS, HEADS, GROUPS, HIDDEN, TOKENS = 2, 8, 2, 512, 1024


def _block(cp: int, dp: int, fp8: str | None, checkpoint: str | None) -> Any:
    """Layers of Transformer Engine's modules, with its attention (checkpoint None) or with ours in it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dfa_megatron.megatron import declare_batch_layout, distribute_attention

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
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

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
