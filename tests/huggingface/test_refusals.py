"""What a model asks for and would not get is refused by name when it is prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import MegatronConfig, TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.checks.call_checks import computes_loss
from dfa_megatron.huggingface.current_forward import CONTEXT
from tests.huggingface.test_parity import NEWER
from tests.support.models import build, text

pytestmark = pytest.mark.support("models", "models that are not supported are refused")


def test_a_model_whose_decoder_is_not_its_stack_is_refused() -> None:
    from transformers import ModernBertDecoderConfig, ModernBertDecoderForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    config = ModernBertDecoderConfig(**sizes, num_hidden_layers=2, pad_token_id=0, layer_types=["full_attention"] * 2)
    with pytest.raises(UnsupportedError, match="a modernbert-decoder model is not supported: its get_decoder"):
        dfa_hf.distribute_attention(ModernBertDecoderForCausalLM(config))


def test_a_model_of_several_stacks_is_refused() -> None:
    from transformers import BltConfig, BltForCausalLM

    part = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    names = ("patcher_config", "encoder_config", "decoder_config", "global_config")
    sizes: dict[str, Any] = {name: {**part, "vocab_size": 61} for name in names}
    config = BltConfig(vocab_size=61, **sizes, encoder_hash_byte_group_vocab=16, attn_implementation="eager")
    with pytest.raises(UnsupportedError, match="a blt model is not supported: its config names no number of layers"):
        dfa_hf.distribute_attention(BltForCausalLM(config))


def test_a_decoder_is_refused_attention_over_an_encoder_and_its_own_loss() -> None:
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
    tokens = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = BartForCausalLM(BartConfig(**sizes, **tokens, attn_implementation="eager"))
    dfa_hf.distribute_attention(model)
    assert not computes_loss(model)
    with pytest.raises(UnsupportedError, match="not causal"):
        model(input_ids=text(1, 8, seed=0)["input_ids"], encoder_hidden_states=torch.randn(1, 8, 32))


@pytest.mark.parametrize("checkpoint", ["remat", "full"])
def test_a_model_that_transformers_does_not_checkpoint_is_refused_as_it_was(checkpoint: str) -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel, JetMoeConfig, JetMoeForCausalLM

    ctrl = CTRLConfig(vocab_size=61, n_positions=64, n_embd=32, dff=24, n_layer=2, n_head=4)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_key_value_heads": 2}
    jetmoe = JetMoeConfig(vocab_size=61, **sizes, kv_channels=8, num_local_experts=4, num_experts_per_tok=2)
    for model in (CTRLLMHeadModel(ctrl), JetMoeForCausalLM(jetmoe)):
        before = model.config._attn_implementation
        with pytest.raises(UnsupportedError, match=f"checkpoint='{checkpoint}' for a .*does not checkpoint its layers"):
            dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint=checkpoint))
        assert model.config._attn_implementation == before != dfa_hf.NAME
        assert not any(hasattr(module, CONTEXT) or module._forward_pre_hooks for module in model.modules())
        dfa_hf.distribute_attention(model)


def test_layers_that_share_keys_are_refused_what_would_lose_their_gradients_or_rows() -> None:
    kind, changes = NEWER["gemma4-shared-keys-window-in-half-of-the-layers"]
    model = build(kind, **changes)
    with pytest.raises(UnsupportedError, match="re-entrant checkpointing of a gemma4_text model whose layers share"):
        dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint="full"), reentrant=True)
    assert model.config._attn_implementation == "eager"
    dfa_hf.distribute_attention(model)
    with pytest.raises(UnsupportedError, match="logits_to_keep in a model whose layers share keys"):
        model(input_ids=text(1, 8, seed=0)["input_ids"], logits_to_keep=3)


def test_a_model_that_keeps_to_its_own_attention_is_refused() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    with pytest.raises(UnsupportedError, match=r"a falcon model.*code of their own"):
        dfa_hf.distribute_attention(FalconForCausalLM(FalconConfig(**sizes)))


class Two(torch.nn.Module):
    """Policy and reference; the policy is held by a wrapper of its own, and known by a second name."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.policy = torch.nn.Sequential(build("Llama"))
        self.alias = self.policy[0]
        self.reference = reference


def test_several_models_in_one_module_are_refused() -> None:
    both = Two(build("Qwen3"))
    with pytest.raises(UnsupportedError, match=r"several transformers models.*a Two with LlamaForCausalLM, Qwen3For"):
        dfa_hf.distribute_attention(both)
    assert both.alias.config._attn_implementation == "eager"
    one = Two(torch.nn.Linear(1, 1))
    assert dfa_hf.distribute_attention(one) is one
    assert one.alias.config._attn_implementation == dfa_hf.NAME


@pytest.mark.parametrize(
    "kind", ["LlamaForSequenceClassification", "LlamaForTokenClassification", "LlamaForQuestionAnswering"]
)
def test_a_head_that_is_not_of_a_language_model_is_refused(kind: str) -> None:
    import transformers

    model = getattr(transformers, kind)(build("Llama").config)
    with pytest.raises(UnsupportedError, match=f"{kind} is not supported: its head or its loss reads across tokens"):
        dfa_hf.distribute_attention(model)
    decoder = model.get_decoder()
    assert dfa_hf.distribute_attention(decoder) is decoder


def test_a_second_head_beside_that_of_a_language_model_is_refused() -> None:
    from transformers import GPT2Config, GPT2DoubleHeadsModel, GPT2LMHeadModel

    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0)
    with pytest.raises(UnsupportedError, match="GPT2DoubleHeadsModel is not supported: its head"):
        dfa_hf.distribute_attention(GPT2DoubleHeadsModel(config))
    dfa_hf.distribute_attention(GPT2LMHeadModel(config))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"config": MegatronConfig(data_layout="zigzag")}, "data_layout='zigzag'.*it must be a TrainingConfig"),
        ({"config": TrainingConfig(ulysses_degree=2)}, "ulysses_degree=2 on a group of 1 ranks"),
    ],
)
def test_an_option_that_means_nothing_here_is_refused(keywords: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        dfa_hf.distribute_attention(build("Llama"), **keywords)
