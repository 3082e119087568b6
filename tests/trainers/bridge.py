"""Compare Megatron-Bridge's forward_step on packs, two ranks to a sequence with our attention, with its own at CP 1.

    pip install --no-deps --target FOLDER megatron-bridge==0.3.1 ...   # and what it imports
    python -m tests.trainers.bridge FOLDER

CI does not run this: Megatron-Bridge needs Transformer Engine and modelopt, which are stubbed here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.trainers.toy import FIELDS, VOCABULARY, begin, compare, documents, gradients, layers, stub, weigh, zigzag


def model_of(ranks: int) -> Any:
    """Return the model that Megatron-Bridge's provider makes, wrapped by it."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

    provider = GPTModelProvider(
        **FIELDS,
        vocab_size=VOCABULARY,
        seq_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        context_parallel_size=ranks,
        calculate_per_token_loss=True,  # as Megatron-Bridge demands with context parallelism
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
    )
    provider.transformer_layer_spec = layers
    provider.finalize()
    ddp = DistributedDataParallelConfig()
    (model,) = provider.provide_distributed_model(ddp, use_cpu_initialization=True, pre_wrap_hook=weigh)
    provider.finalize_model_grads_func = finalize_model_grads
    return model


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield packs of two documents as Megatron-Bridge's packed data set collates them, padded to four tokens."""
    tokens = documents()
    for pack in (tokens[:2], tokens[2:]):
        lengths, rooms = [len(x) - 1 for x in pack], [-(-(len(x) - 1) // 4) * 4 for x in pack]
        fill = partial(zip, pack, lengths, rooms)
        made = {
            "tokens": [torch.cat((x[:-1], x.new_full((room - n,), 1))) for x, n, room in fill()],
            "labels": [torch.cat((x[1:], x.new_full((room - n,), 1))) for x, n, room in fill()],
            "loss_mask": [((torch.arange(room) >= 2) & (torch.arange(room) < n)).float() for _, n, room in fill()],
            "position_ids": [torch.arange(room) for room in rooms],
        }
        batch = {name: torch.cat(value)[None] for name, value in made.items()}
        ends = {"cu_seqlens": rooms, "cu_seqlens_unpadded": lengths}
        for name, value in ends.items():
            batch[name] = torch.tensor([[0, *accumulate(value), -1]], dtype=torch.int32)
            batch[f"{name}_argmin"] = torch.tensor([[3]])
        yield {**batch, "max_seqlen": torch.tensor([[max(rooms)]])}


def train(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    begin(ranks)
    stub("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext")
    import transformer_engine_torch
    from megatron.bridge.training import gpt_step
    from megatron.core.pipeline_parallel import get_forward_backward_func

    transformer_engine_torch.thd_get_partitioned_indices = zigzag
    gpt_step.is_te_min_version = lambda *_: True
    model = model_of(ranks)
    rerun = SimpleNamespace(check_for_nan_in_loss=True, check_for_spiky_loss=False)
    cfg = SimpleNamespace(rerun_state_machine=rerun, dataset=SimpleNamespace())
    state = SimpleNamespace(timers=MagicMock(), straggler_timer=lambda **_: nullcontext(), cfg=cfg)
    state.straggler_timer = MagicMock()
    reported = get_forward_backward_func()(
        forward_step_func=partial(gpt_step.forward_step, state),
        data_iterator=batches(),
        model=[model],
        num_microbatches=2,
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    loss = torch.stack([entry["lm loss"] for entry in reported])
    torch.distributed.all_reduce(loss)
    return {"losses and tokens": loss, **gradients(model)}


if __name__ == "__main__":
    sys.exit(compare(train))
