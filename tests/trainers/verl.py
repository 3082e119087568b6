"""Compare verl's Megatron engine on packs, two ranks to a sequence with our attention, with its own at CP 1.

    pip install --no-deps --target FOLDER verl==0.9.1 megatron-bridge==0.3.1 ...   # and what they import
    python -m tests.trainers.verl FOLDER

CI does not run this: verl brings ray and tensordict, and Megatron-Bridge what is stubbed here.

Two things are verl's own, with any attention. The last token of a document has a log-probability of another label for
each number of ranks. At CP > 1 the loss is divided by each micro-batch's tokens over CP, rounded down: documents here
have even totals, because others gave gradients that were 2 % larger.
"""

from __future__ import annotations

import sys
from functools import partial
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch

from tests.trainers.toy import FIELDS, VOCABULARY, begin, compare, documents, gradients, layers, stub, weigh

CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": FIELDS["hidden_size"],
    "intermediate_size": FIELDS["ffn_hidden_size"],
    "num_hidden_layers": FIELDS["num_layers"],
    "num_attention_heads": FIELDS["num_attention_heads"],
    "num_key_value_heads": FIELDS["num_query_groups"],
    "max_position_embeddings": 64,
    "architectures": ["LlamaForCausalLM"],
}
NO_CUDA = (
    "apply_rope_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "bias_dropout_fusion",
    "bias_activation_fusion",
    "masked_softmax_fusion",
    "cross_entropy_loss_fusion",
)


def use_layers() -> None:
    """Give every model of verl our layers: what a module that external_lib names has to do."""
    from verl.models.mcore.bridge import AutoBridge

    theirs = AutoBridge.to_megatron_provider

    def to_megatron_provider(self: Any, *args: Any, **options: Any) -> Any:
        provider = theirs(self, *args, **options)
        provider.transformer_layer_spec = layers
        return provider

    AutoBridge.to_megatron_provider = to_megatron_provider


def engine(ranks: int, folder: str) -> Any:
    """Return verl's engine with the model that it makes, without its constructor, which loads weights on CUDA."""
    from megatron.core.distributed import finalize_model_grads
    from transformers import LlamaConfig
    from verl.utils.megatron_utils import McoreModuleWrapperConfig, make_megatron_module
    from verl.workers.config import McoreEngineConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    made = MegatronEngineWithLMHead.__new__(MegatronEngineWithLMHead)
    options = {"transformer_impl": "local", **dict.fromkeys(NO_CUDA, False)}
    options["calculate_per_token_loss"] = ranks > 1
    made.engine_config = McoreEngineConfig(
        context_parallel_size=ranks, use_remove_padding=True, override_transformer_config=options
    )
    object.__setattr__(made.engine_config, "dtype", "float32")
    config = LlamaConfig(**CONFIG)
    config.save_pretrained(folder)
    made.model_config = SimpleNamespace(
        hf_config=config,
        local_path=folder,
        trust_remote_code=False,
        model_type="language_model",
        share_embeddings_and_output_weights=False,
        lora={},
        mtp=SimpleNamespace(enable=False, enable_train=False),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    made.enable_routing_replay = made._qat_enabled = False
    made._build_tf_config()
    wrap = McoreModuleWrapperConfig(use_distributed_optimizer=False)
    made.provider.register_pre_wrap_hook(weigh)
    made.module, made.tf_config = make_megatron_module(wrap, None, config, made.bridge, made.provider)
    made.tf_config.finalize_model_grads_func = finalize_model_grads
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
    stub("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext")
    from verl.workers.utils.losses import sft_loss

    use_layers()
    with TemporaryDirectory() as folder:
        made = engine(ranks, folder)
    out = made.forward_backward_batch(batch(), partial(sft_loss, None))
    found = {"entropy": out["model_output"]["entropy"].values()}
    # The last token of a document has no label: verl gives it one that depends on the number of ranks.
    found["log_probs"] = torch.cat([part[:-1] for part in out["model_output"]["log_probs"].unbind()])
    return {"loss": torch.tensor(out["loss"]), **found, **gradients(made.module[0])}


if __name__ == "__main__":
    sys.exit(compare(train))
