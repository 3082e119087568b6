"""Compare slime's train_one_step on packs, two ranks to a sequence with our attention, with its own at CP 1.

    git clone https://github.com/THUDM/slime FOLDER   # commit 624b824
    python -m tests.trainers.slime FOLDER

CI does not run this: slime needs Megatron-LM's megatron.training, which is stubbed here.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.support.megatron_model import Parallel, config_of
from tests.trainers.toy import FIELDS, VOCABULARY, begin, compare, documents, gradients, layers, stub, wrap


def slime_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Return what --spec names."""
    return layers(config, vp_stage)


def arguments() -> Namespace:
    """Return the command line that slime's model and step read."""
    return Namespace(
        transformer_impl="local",
        spec=[__name__, "slime_layers"],
        fp8_param_gather=False,
        padded_vocab_size=VOCABULARY,
        max_position_embeddings=64,
        fp16_lm_cross_entropy=False,
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=10000,
        use_rope_scaling=False,
        mtp_num_layers=None,
        enable_mtp_training=False,
        custom_megatron_before_train_step_hook_path=None,
        rollout_top_p=1.0,
        rollout_temperature=0.7,
        save_debug_train_data=None,
        data_pad_size_multiplier=8,
        allgather_cp=False,
        loss_type="sft_loss",
        calculate_per_token_loss=False,
        recompute_loss_function=False,
        log_probs_chunk_size=-1,
        seq_length=64,
        micro_batch_size=1,
        decoder_seq_length=None,
        check_for_nan_in_loss_and_grad=True,
        ci_test=False,
    )


def rollout() -> dict[str, Any]:
    """Return what a rank trains on: two micro-batches of two documents, with a loss on the last tokens of each."""
    tokens = documents()
    answers = [len(x) - min(4, len(x) // 2) for x in tokens]
    masks = [(torch.arange(n) != 2).float() for n in answers]
    return {
        "tokens": tokens,
        "loss_masks": masks,
        "total_lengths": [len(x) for x in tokens],
        "response_lengths": answers,
        "rollout_mask_sums": [mask.sum() for mask in masks],
    }


def train(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    begin(ranks)
    stub("megatron.training", "wandb")
    from slime.backends.megatron_utils import data, model, model_provider
    from slime.utils import accelerator

    args = arguments()
    sys.modules["megatron.training"].get_args = model.get_args = lambda: args
    accelerator.device = accelerator.current_device = lambda: torch.device("cpu")
    config = config_of(FIELDS, Parallel(1, 1, ranks, None, None))
    model_provider.core_transformer_config_from_args = lambda _: config
    chunk = wrap(model_provider._get_model_provider_func(args)())
    found: dict[str, torch.Tensor] = {}

    def step() -> tuple[bool, float, int]:
        found.update({name: gradient.clone() for name, gradient in gradients(chunk).items()})
        return True, 0.0, 0

    optimizer = SimpleNamespace(step=step, zero_grad=lambda: None)
    batches = [data.DataIterator(rollout(), [[0, 1], [2, 3]])]
    metrics, _ = model.train_one_step(args, 0, 0, batches, [chunk], optimizer, MagicMock(), 2, 4)
    return {**{name: torch.as_tensor(value) for name, value in metrics.items()}, **found}


if __name__ == "__main__":
    sys.exit(compare(train))
