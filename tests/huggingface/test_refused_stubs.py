"""Refusals that no other test meets: the function that checks is given the least that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace as Stub
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import attention_function, windows
from dfa_megatron.huggingface.checks import call_checks
from dfa_megatron.huggingface.checks.check_model import check_model
from dfa_megatron.huggingface.current_forward import CONTEXT
from dfa_megatron.huggingface.small.shrink import _heads
from dfa_megatron.huggingface.trainers import distribute_accelerator, distribute_trainer
from dfa_megatron.proving.small_job import Reductions, Small
from tests.support.models import build


def changed(model: Any, size: int = 1, **facts: Any) -> Any:
    """A distributed model that believes other facts."""
    dfa_hf.distribute_attention(model)
    setattr(model, CONTEXT, replace(getattr(model, CONTEXT), size=size, **facts))
    return model


def with_config(causal: bool = True, **fields: Any) -> Any:
    """A model whose config changed after it was built; the second of its layers has no attention."""
    model = build("Llama")
    model.model.layers[0].self_attn.is_causal, model.model.layers[1].self_attn = causal, torch.nn.Identity()
    model.config.layer_types = ["full_attention", fields.pop("second", "mlp")]
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def without_positions() -> Any:
    model = with_config()
    model.model.__class__ = type("Decoder", (type(model.model),), {"forward": lambda self, input_ids: None})
    return model


def trained(**given: Any) -> None:
    from transformers import Trainer

    names = ("eval_use_gather_object", "include_num_input_tokens_seen", "gradient_checkpointing")
    own = dict.fromkeys(("label_smoother", "compute_loss_func", "model_init")) | given
    asked, model = Stub(**dict.fromkeys(names, False) | given), Stub(config=Stub(output_router_logits=True))
    distribute_trainer._check(Stub(**own, model=model, compute_loss=Trainer.compute_loss, args=asked), REMAT)


def accelerated(tp_size: int = 1, distributed_type: str = "NO", dispatch_batches: bool = False) -> None:
    kinds = {"distributed_type": distributed_type, "dispatch_batches": dispatch_batches}
    distribute_accelerator._check(Stub(parallelism_config=Stub(tp_size=tp_size), **kinds))


def attend(keys: int = 8, mask: Any = None, sinks: Any = None, **more: Any) -> None:
    layer = changed(build("Llama")).model.layers[0].self_attn
    layer.sinks = sinks
    attention_function.attention(layer, torch.zeros(1, 4, 8, 8), *[torch.zeros(1, 4, keys, 8)] * 2, mask, **more)


REMAT = TrainingConfig(checkpoint="remat")
CHUNKED: Any = Stub(config=Stub(layer_types=["chunked_attention"], attention_chunk_size=8), layer_idx=0)
ALONE = Stub(state=Stub(num_processes=2), parallelism_config=None)
CASES: list[tuple[str, Callable[[], Any]]] = [
    ("head_mask in a layer of type LlamaAttention", lambda: attend(head_mask=torch.ones(1))),
    ("attention dropout 0.2", lambda: attend(dropout=0.2)),
    ("sinks in a layer of type LlamaAttention", lambda: attend(sinks=torch.ones(4))),
    ("sliding_window=None in a layer.*one of 0", lambda: attend(mask=windows.WindowMask(0))),
    ("no transformers model", lambda: dfa_hf.distribute_attention(torch.nn.Linear(1, 1))),
    ("attention in 1 of 2 layers", lambda: check_model(with_config(second="full_attention"))),
    ("attention of 8 tokens over 9", lambda: attend(keys=9)),
    ("a mask beyond causal", lambda: attend(mask=windows.OtherMask())),
    ("an attention_mask with padding", lambda: attention_function.mask(attention_mask=torch.tensor([[1, 0]]))),
    ("chunks of 8 tokens in a layer", lambda: windows.chunk_of(CHUNKED, windows.WindowMask(4))),
    ("cross-attention is not planned", lambda: check_model(with_config(is_encoder_decoder=True))),
    ("a llama model, a multimodal model", lambda: check_model(with_config(get_text_config=dict))),
    ("a config without num_attention_heads", lambda: _heads(Small({}, Reductions(), {}), 1)),
    ("positional arguments", lambda: call_checks.check_by_name((1,))),
    ("1 attentions, 1 of them not causal", lambda: check_model(with_config(causal=False))),
    ("attention dropout 0.1", lambda: check_model(with_config(attention_dropout=0.1))),
    ("layers of type sparse", lambda: check_model(with_config(second="sparse"))),
    ("its layers mask tokens by their values", lambda: check_model(with_config(model_type="doge"))),
    ("embeddings of n-grams", lambda: check_model(with_config(ple_layer_ids=[0]))),
    ("rope_type='dynamic'", lambda: check_model(with_config(rope_parameters={"rope_type": "dynamic"}))),
    ("0 layers whose state is distributed, of 1", lambda: check_model(with_config(second="conv"))),
    ("it takes no position_ids", lambda: check_model(without_positions())),
    ("prove of a LlamaModel.*no head", lambda: dfa_hf.prove(changed(build("Llama").model))),
    ("a multimodal model", lambda: dfa_hf.prove(changed(build("Llama"), multimodal=True))),
    ("size=3 on 2 ranks", lambda: distribute_accelerator.share_sequences(ALONE, None, 3, REMAT, loop=True)),
    ("ParallelismConfig.tp_size=2", lambda: accelerated(tp_size=2)),
    ("with DeepSpeed", lambda: accelerated(distributed_type="DEEPSPEED")),
    ("dispatch_batches=True", lambda: accelerated(dispatch_batches=True)),
    ("model_init", lambda: trained(model_init=build)),
    ("compute_loss_func", lambda: trained(compute_loss_func=print)),
    ("label_smoothing_factor with", lambda: trained(label_smoother=1)),
    ("tokens_seen with", lambda: trained(include_num_input_tokens_seen="all")),
    ("gradient_checkpointing=True", lambda: trained(gradient_checkpointing=True)),
]


@pytest.mark.parametrize(("message", "refused"), CASES, ids=[message for message, _ in CASES])
def test_a_request_is_refused_by_name(message: str, refused: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        refused()


def test_labels_for_a_loss_of_its_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_checks, "computes_loss", lambda model: False)
    model = changed(build("Llama"), size=2)
    with pytest.raises(UnsupportedError, match="labels for a model of type LlamaForCausalLM"):
        call_checks.check_loss(model, {"labels": torch.ones(1, 8)}, getattr(model, CONTEXT))
