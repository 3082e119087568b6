"""transformers' own parallelism, by a `DistributedConfig`, beside ours: weights and experts in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from tests.frameworks.compare import assert_gradients
from tests.huggingface.test_trainer import prepare_worker, whole
from tests.support.models import build, text
from tests.support.workers import over_ranks

LENGTH = 37
STRIDED, CONSECUTIVE = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
"""The groups of four ranks that share a sequence: of the same parts of matrices, and of consecutive ranks."""

EXACT: dict[str, tuple[str, dict[str, int], list[list[int]], dict[str, Any]]] = {
    "tp": ("Llama", {"fsdp_size": 2, "tp_size": 2}, STRIDED, {"kv_heads": 2}),
    "hsdp": ("Llama", {"fsdp_size": 2, "dp_replicate_size": 2}, CONSECUTIVE, {}),
    "ep": ("Qwen3Moe", {"fsdp_size": 4, "ep_size": 2}, CONSECUTIVE, {"output_router_logits": True}),
    "ep over all": ("Qwen3Moe", {"fsdp_size": 4, "ep_size": 4}, [[0, 1, 2, 3]], {"output_router_logits": True}),
    "tp and ep": ("Qwen3Moe", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, STRIDED, {}),
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def shared_out(model: Any, folder: str, **sizes: int) -> Any:
    """Return the model as transformers loads it in parts on all ranks."""
    distributed = pytest.importorskip("transformers.distributed")
    if "dp_replicate_size" not in distributed.DistributedConfig.__dataclass_fields__:
        pytest.skip("transformers cuts models in other ways before 5.21")
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    config = distributed.DistributedConfig(**sizes)
    return type(model).from_pretrained(folder, distributed_config=config, dtype=model.dtype).train()


def group_of(rank: int, groups: list[list[int]]) -> tuple[int, dist.ProcessGroup]:
    made = [dist.new_group(ranks) for ranks in groups]
    at = next(at for at, ranks in enumerate(groups) if rank in ranks)
    return at, made[at]


@pytest.mark.parametrize("case", EXACT)
@over_ranks(4)
def test_parts_of_matrices_and_experts_on_other_ranks_change_no_gradient(
    rank: int, ranks: int, case: str, tmp_path: Path
) -> None:
    prepare_worker(rank, ranks)
    kind, sizes, groups, changes = EXACT[case]
    model = build(kind, **(EXPERTS if kind == "Qwen3Moe" else {}), **changes)
    at, group = group_of(rank, groups)
    seeds = [0] * len(groups) if "tp_size" in sizes else range(len(groups))  # such ranks have the same sequences
    batches = [text(1, LENGTH, seed=seed, unlabelled=5) for seed in seeds]
    losses = [model(**batch).loss for batch in batches]
    torch.stack(losses).mean().backward()
    mine = shared_out(model, str(tmp_path), **sizes)
    dfa_hf.distribute_attention(mine, group=group, config=TrainingConfig(checkpoint="remat"))
    loss = mine(**batches[at]).loss
    torch.testing.assert_close(loss, losses[at], rtol=1e-5, atol=0.0)
    loss.backward()
    found = {name: whole(x.grad) for name, x in mine.named_parameters()}
    assert_gradients(found, {name: x.grad for name, x in model.named_parameters()}, case)


@over_ranks(4)
def test_ranks_that_multiply_the_same_tokens_are_refused_as_a_group_of_a_sequence(
    rank: int, ranks: int, tmp_path: Path
) -> None:
    prepare_worker(rank, ranks)
    strided, consecutive = group_of(rank, STRIDED)[1], group_of(rank, CONSECUTIVE)[1]
    mine = shared_out(build("Llama"), str(tmp_path / "dense"), fsdp_size=2, tp_size=2)
    for group in (consecutive, None):
        with pytest.raises(UnsupportedError, match=r"tensor parallelism of ranks \[\d, \d\], .* hold different tokens"):
            dfa_hf.distribute_attention(mine, group=group)
    with pytest.raises(UnsupportedError, match=r"loss by tiles with a head of type .* a forward of its own"):
        dfa_hf.distribute_attention(mine, group=strided, config=TrainingConfig(loss_tile=8))
    sparse = {"index_topk": 8, "index_head_dim": 24, "index_n_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    chooses = build("DeepseekV32", kv_heads=4, **sparse, kv_lora_rank=8, q_lora_rank=16, v_head_dim=8)
    chooses = shared_out(chooses, str(tmp_path / "sparse"), fsdp_size=2, tp_size=2)
    with pytest.raises(UnsupportedError, match="tensor parallelism of a model with a DeepseekV32Indexer"):
        dfa_hf.distribute_attention(chooses, group=strided)
