"""What a model asks for and would not get is refused by name; where nothing else is, the least that a check refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace as Stub
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import MegatronConfig, TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import accelerator as accelerators
from dfa_megatron.huggingface import attention_function, loss
from dfa_megatron.huggingface import trainer as trainers
from dfa_megatron.huggingface.current_forward import CONTEXT
from dfa_megatron.huggingface.share_rollouts import check_rollouts, share_rollouts
from tests.huggingface.one_process import called
from tests.huggingface.rows import GEMMA4
from tests.support.models import build, text

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.support("models", "models that are not supported are refused")


PLANNED = attention_function.PlannedMask()


def changed(model: Any, size: int = 1, **facts: Any) -> Any:
    """A distributed model that believes other facts."""
    dfa_hf.distribute_attention(model)
    setattr(model, CONTEXT, replace(getattr(model, CONTEXT), size=size, **facts))
    return model


def with_config(**fields: Any) -> Any:
    """A model whose config changed after it was built; the second of its layers has no attention."""
    model = build("Llama")
    model.model.layers[1].self_attn = torch.nn.Identity()
    model.config.layer_types = ["full_attention", fields.pop("second", "mlp")]
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def trained(**given: Any) -> None:
    from transformers import Trainer

    names = ("eval_use_gather_object", "gradient_checkpointing")
    own = dict.fromkeys(("label_smoother", "compute_loss_func", "model_init")) | given
    asked, model = Stub(**dict.fromkeys(names, False) | given), Stub(config=Stub(output_router_logits=True))
    trainers._check(Stub(**{"model": model, "compute_loss": Trainer.compute_loss, "args": asked, **own}), REMAT)


def accelerated(distributed_type: str = "NO", dispatch_batches: bool = False, **sizes: int) -> None:
    kinds = {"distributed_type": distributed_type, "dispatch_batches": dispatch_batches}
    kinds["state"] = Stub(fsdp_plugin=Stub(fsdp_version=1))
    accelerators._check(Stub(parallelism_config=Stub(**sizes), **kinds))


def attend(keys: int = 8, mask: Any = PLANNED, **more: Any) -> None:
    layer = changed(build("Llama")).model.layers[0].self_attn
    with called(layer, 8):
        attention_function.attention(layer, torch.zeros(1, 4, 8, 8), *[torch.zeros(1, 4, keys, 8)] * 2, mask, **more)


def asked(model: Any, unlisted: bool = False, **options: Any) -> Any:
    return dfa_hf.distribute_attention(model, config=TrainingConfig(**options), unlisted=unlisted)


def sized(kind: str, model: str = "ForCausalLM", **fields: Any) -> Any:
    """A small model of transformers."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, "num_hidden_layers": 2, "pad_token_id": 0, **fields})
    return getattr(transformers, f"{kind}{model}")(config)


def headed(head: str) -> None:
    model = sized("Llama", head)
    decoder = model.get_decoder()
    try:
        asked(model)
    finally:
        assert asked(decoder) is decoder


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
REMAT = TrainingConfig(checkpoint="remat")
SIZES = {
    **dict.fromkeys(("steps_per_generation", "gradient_accumulation_steps"), 1),
    "per_device_train_batch_size": 5,
    "per_device_eval_batch_size": 3,
}
SAMPLES: dict[str, Any] = {"use_vllm": False, "use_transformers_continuous_batching": False, "_is_vlm": False}
ASKED = Stub(use_vllm=False, use_transformers_continuous_batching=False, eval_strategy="no", **SIZES)
GENERATES: dict[str, Any] = {
    "args": ASKED, "accelerator": Stub(num_processes=2), "_is_vlm": False, "num_generations_eval": 2,
}  # fmt: skip
CASES: list[tuple[str, Callable[[], Any]]] = [
    ("head_mask in a layer of type LlamaAttention", lambda: attend(head_mask=torch.ones(1))),
    ("attention dropout in a layer of type LlamaAttention", lambda: attend(dropout=0.2)),
    ("attention that is not causal", lambda: attend(is_causal=False)),
    ("not causal in a layer of type BertSelf", lambda: asked(sized("Bert", "ForMaskedLM"))),
    ("not causal in a layer of type ModernBert", lambda: asked(sized("ModernBert", "ForMaskedLM"), unlisted=True)),
    ("a window of 0 tokens", lambda: attend(mask=attention_function.PlannedMask(0))),
    ("no transformers model", lambda: dfa_hf.distribute_attention(torch.nn.Linear(1, 1))),
    ("1 attentions in 2 layers, 2 of them different", lambda: asked(with_config(second="full_attention"))),
    ("attention of 8 tokens over 9", lambda: attend(keys=9)),
    ("a mask beyond causal", lambda: attend(mask=attention_function.PlannedMask(planned=False))),
    ("attention dropout 0.1", lambda: asked(build("Llama", attention_dropout=0.1))),
    ("a moshi model with rope_type=dynamic", lambda: asked(sized("Moshi", rope_parameters=DYNAMIC))),
    ("prove of a LlamaModel.*no head", lambda: dfa_hf.prove(changed(build("Llama").model))),
    ("prove of a Llama.*no images or sound", lambda: dfa_hf.prove(changed(build("Llama"), multimodal=True))),
    ("ParallelismConfig.cp_size=2", lambda: accelerated(cp_size=2)),
    ("ParallelismConfig.tp_size=2", lambda: accelerated(tp_size=2)),
    ("FSDP1 of accelerate.*fsdp_version=2", lambda: accelerated(distributed_type="FSDP")),
    ("dispatch_batches=True", lambda: accelerated(dispatch_batches=True)),
    ("model_init", lambda: trained(model_init=build)),
    ("compute_loss_func", lambda: trained(compute_loss_func=print)),
    ("label_smoothing_factor with", lambda: trained(label_smoother=1)),
    ("tools in .*: the ranks of a sequence", lambda: check_rollouts(Stub(**GENERATES, tools=[print]))),
    (
        "learned positions in .*: TRL counts",
        lambda: check_rollouts(Stub(**GENERATES, model=sized("GPT2", "LMHeadModel"))),
    ),
    ("10 and 0 answers by 2 groups", lambda: share_rollouts(Stub(**GENERATES, num_generations=4), 3)),
    ("gradient_checkpointing=True", lambda: trained(gradient_checkpointing=True)),
    ("'remat' with GRPO", lambda: trained(model=sized("Llama"), _generate_and_score_completions=1, **SAMPLES)),
    ("a falcon model.*code of their own", lambda: asked(sized("Falcon"), unlisted=True)),
    ("a llama model with layers of type sparse", lambda: asked(with_config(second="sparse"))),
    ("a class, GPT2DoubleHeadsModel, whose head", lambda: asked(sized("GPT2", "DoubleHeadsModel"))),
    *(
        (f"a class, Llama{head}, whose head or loss may read", partial(headed, head))
        for head in ("ForTokenClassification", "ForQuestionAnswering")
    ),
    ("a class, GPT2ForSequenceClassification, whose", lambda: asked(sized("GPT2", "ForSequenceClassification"))),
    ("smoothing_factor with", lambda: trained(label_smoother=1, model=sized("Llama", "ForSequenceClassification"))),
    (
        "data_layout='zigzag'.*it must be a TrainingConfig",
        lambda: dfa_hf.distribute_attention(build("Llama"), config=MegatronConfig(data_layout="zigzag")),
    ),
    ("distribute_trainer of a Llama.*distribute_attention", lambda: dfa_hf.distribute_trainer(build("Llama"))),
    ("distribute_accelerator of a Llama.*distribute_att", lambda: dfa_hf.distribute_accelerator(build("Llama"), None)),
    ("a model of type SimpleNamespace: no transformers model", lambda: dfa_hf.distribute_attention(Stub())),
    ("ulysses_degree=2 on a group of 1 ranks", lambda: asked(build("Llama"), ulysses_degree=2)),
]


@pytest.mark.parametrize(("message", "refused"), CASES, ids=[message for message, _ in CASES])
def test_a_request_is_refused_by_name(message: str, refused: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refused()


@pytest.mark.parametrize("kind", ["Opt", "Bart", "MiniMax", "Doge", "RecurrentGemma", "DeepseekV32"])
def test_a_type_that_was_not_tried_is_refused_and_one_word_lets_it_pass_to_prove(kind: str) -> None:
    model = build("Llama")
    model.config.model_type = kind.lower()
    unchanged(model, rf"a type, {kind.lower()}, that is not on the list.*unlisted=True.*prove")
    dfa_hf.distribute_attention(model, unlisted=True)(**text(1, 8, seed=0))
    model.model.layers[0] = copy.deepcopy(model.model.layers[0])
    model(**text(1, 8, seed=0))  # layers that are adopted later are as unlisted


def test_labels_for_a_loss_of_its_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "computes_loss", lambda model: False)
    model = changed(build("Llama"), size=2)
    with pytest.raises(UnsupportedError, match="labels for the loss function in LlamaForCausalLM"):
        loss.check_loss(model, {"labels": torch.ones(1, 8)}, getattr(model, CONTEXT))


def unchanged(model: Any, message: str, **asked: Any) -> Any:
    """A model that is refused stays as it was."""
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedError, match=message):
        dfa_hf.distribute_attention(model, **asked)
    assert model.config._attn_implementation == before != dfa_hf.NAME
    assert not any(hasattr(module, CONTEXT) or module._forward_pre_hooks for module in model.modules())
    return model


@pytest.mark.parametrize("checkpoint", ["remat", "full"])
def test_a_model_whose_layers_cannot_be_checkpointed_is_refused_as_it_was(checkpoint: str) -> None:
    asked = TrainingConfig(checkpoint=checkpoint)
    experts = {"num_key_value_heads": 2, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    for model in (sized("CTRL", "LMHeadModel", dff=24), sized("JetMoe", **experts)):
        said = f"checkpoint='{checkpoint}' for a .*does not checkpoint its layers"
        dfa_hf.distribute_attention(unchanged(model, said, config=asked))
    said = "re-entrant checkpointing of a gemma4_text model whose layers share"
    unchanged(build(GEMMA4[0], **GEMMA4[1]), said, config=asked, reentrant=True)


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


def stacked(change: Callable[[Any], Any]) -> Any:
    """A model of four layers, changed, that is distributed then."""
    model = build("Qwen2", num_hidden_layers=4)
    change(model)
    return dfa_hf.distribute_attention(model)


def repeat(model: Any, copied: Callable[[Any], Any] = lambda layer: layer) -> None:
    model.model.layers[3] = copied(model.model.layers[1])


def cut_off(model: Any, layers: int = 2) -> None:
    model.model.layers = model.model.layers[:layers]


def renamed(model: Any, layers: int) -> None:
    cut_off(model, layers)
    model.config.num_hidden_layers, model.config.layer_types = layers, model.config.layer_types[:layers]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_stack_that_its_config_does_not_know_is_refused_by_what_it_is(layers: int) -> None:
    said = r"in 4 layers, 3 of them different, whose config names 4.*deepcopy of each"
    with pytest.raises(UnsupportedError, match=said):
        stacked(repeat)
    said = rf"in {layers} layers, {layers} of them different, whose config names 4.*num_hidden_layers, with layer_types"
    with pytest.raises(UnsupportedError, match=said):
        stacked(partial(cut_off, layers=layers))
    for works in (partial(repeat, copied=copy.deepcopy), partial(renamed, layers=layers)):
        batch = text(1, 8, seed=0)
        stacked(works)(**batch)
