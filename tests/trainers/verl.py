"""Compare verl's Megatron engine on packs, two ranks to a sequence with our attention, with its own at CP 1.

    pip install --no-deps --target FOLDER verl==0.9.1 ...   # and what it imports
    python -m tests.trainers.verl FOLDER

CI does not run this: verl brings ray and tensordict.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.trainers.toy import begin, build, compare, documents, gradients


def engine(model: Any, ranks: int) -> Any:
    """Return verl's engine around our model, without its constructor, which loads Hugging Face weights on CUDA."""
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    made = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    made.engine_config = McoreEngineConfig(context_parallel_size=ranks, use_remove_padding=True)
    made.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]),
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    made.module, made.tf_config, made.enable_routing_replay = [model], model.config, False
    return made


def batch() -> Any:
    """Return two micro-batches of two documents, with a loss on the last tokens of each."""
    from verl.utils import tensordict_utils as tu

    tokens = documents()
    masks = [(torch.arange(len(x)) >= min(4, len(x) // 2)).long() for x in tokens]
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    plain = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "calculate_entropy": True}
    return tu.get_tensordict(
        {"input_ids": nested(tokens), "loss_mask": nested(masks), "temperature": torch.full((len(tokens),), 0.7)}, plain
    )


def train(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    begin(ranks)
    from verl.workers.utils.losses import sft_loss

    model = build(ranks, calculate_per_token_loss=ranks > 1)  # as Megatron-Bridge sets it
    out = engine(model, ranks).forward_backward_batch(batch(), partial(sft_loss, None))
    found = {"entropy": out["model_output"]["entropy"].values()}
    # The last token of a document has no label: verl gives it one that depends on the number of ranks.
    found["log_probs"] = torch.cat([part[:-1] for part in out["model_output"]["log_probs"].unbind()])
    return {"loss": torch.tensor(out["loss"]), **found, **gradients(model)}


if __name__ == "__main__":
    sys.exit(compare(train))
