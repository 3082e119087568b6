"""A loss function of one's own is that of one process if its author marks it as a sum over tokens, else refused."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.loss import tiled_loss
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.support.models import build, gradients, text
from tests.support.workers import run_each

Loss = Callable[..., torch.Tensor]


def weighed(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None,
    shift_labels: torch.Tensor | None = None, z: float = 0.0, power: float = 0.0, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Cross-entropy, with that of rare tokens weighed (as focal losses do) and the squares of logsumexp added."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    each = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="none")
    each = each * (1 - torch.exp(-each)) ** power
    each = each + z * logits.logsumexp(-1).flatten().square() * (shift_labels.flatten() != -100)
    count = (shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return each.sum() / count


def drawn(draw: random.Random) -> Loss:
    """A sum over tokens, as a function, with arguments bound, as a method, or around another."""
    more = {"z": draw.choice((0.0, 0.1)), "power": draw.choice((0.0, 1.5))}

    class Own:
        def method(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return weighed(*args, **kwargs, **more)

    @functools.wraps(weighed)
    def around(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 2 * weighed(*args, **kwargs, **more)

    kind = draw.choice(("partial", "method", "around"))
    if kind == "method":
        dfa_hf.sums_tokens(Own.method)
        return Own().method
    return dfa_hf.sums_tokens(functools.partial(weighed, **more) if kind == "partial" else around)


def marked(rank: int, world_size: int) -> None:
    draw = random.Random(7)
    for _ in range(8):
        length, own = draw.randrange(9, 30), drawn(draw)
        whole = text(draw.choice((1, 2)), length, seed=draw.randrange(99), unlabelled=draw.randrange(length // 2))
        want, model = build("Llama").double(), dfa_hf.distribute_attention(build("Llama").double())
        want.loss_function = model.loss_function = own
        loss = want(**whole).loss
        loss.backward()
        got = model(**whole).loss
        got.backward()
        assert_loss(got, loss.detach(), str(own), 1e-7)
        assert_gradients(model, gradients(want), str(own), 1e-6)


def refused(rank: int, world_size: int) -> None:
    from transformers.loss import loss_utils

    dfa_hf.sums_tokens(weighed)
    whole = text(1, 17, seed=1)

    def of_class(model: Any) -> None:
        own = {"loss_function": lambda self, *args, **kwargs: weighed(*args, **kwargs)}
        model.__class__ = type("Other", (type(model),), own)

    @functools.wraps(weighed)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        return weighed(*args, **kwargs) + 1

    def patched(logits: Any, labels: Any, vocab_size: int, **more: Any) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    patched.__name__ = patched.__qualname__ = "ForCausalLMLoss"
    ways: list[tuple[str, Callable[[Any], Any]]] = [
        ("weighed", lambda model: setattr(model, "loss_function", wrapped)),
        ("partial", lambda model: setattr(model, "loss_function", functools.partial(weighed, z=1.0))),
        ("partial", lambda model: setattr(model, "_loss_function", functools.partial(loss_utils.ForCausalLMLoss))),
        ("lambda", lambda model: setattr(model, "loss_function", lambda *args, **kwargs: args[0].sum())),
        ("ForMaskedLMLoss", lambda model: setattr(model, "loss_type", "ForMaskedLM")),
        ("ForTokenClassification", lambda model: setattr(model, "loss_type", "ForTokenClassification")),
        ("lambda", of_class),
    ]
    for tile in ("off", 5):
        for said, change in ways if tile == "off" else ways[4:6]:
            model = dfa_hf.distribute_attention(build("Llama"), config=TrainingConfig(loss_tile=tile))
            change(model)
            with pytest.raises(UnsupportedError, match=f"labels for the loss function .*{said}.*sums_tokens marks"):
                model(**whole)
            # What works: the logits, and our loss of them.
            loss = dfa_hf.causal_lm_loss(model(input_ids=whole["input_ids"]).logits, whole["labels"])
            assert_loss(loss, build("Llama")(**whole).loss.detach(), said)
    model = dfa_hf.distribute_attention(build("Llama"))
    with pytest.raises(UnsupportedError, match="ignore_index=0 in a call"):
        model(**whole, ignore_index=0)
    with pytest.MonkeyPatch.context() as patch:  # as packages of faster losses do
        patch.setattr(loss_utils, "ForCausalLMLoss", patched)
        patch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", patched)
        with pytest.raises(UnsupportedError, match="labels for the loss function ForCausalLMLoss"):
            model(**whole)
    model.loss_type = "ForOdours"  # which transformers takes for its causal one
    model(**whole)


def test_a_marked_loss_is_that_of_one_process_and_another_is_refused_however_it_was_set() -> None:
    run_each(3, marked, refused, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_has_the_dtype_that_it_is_computed_in(dtype: torch.dtype) -> None:
    head, labels = torch.nn.Linear(8, 5, bias=False, dtype=dtype), torch.randint(5, (1, 7))
    hidden = torch.randn(1, 7, 8, dtype=dtype)
    for loss in (dfa_hf.causal_lm_loss(head(hidden), labels), tiled_loss(head, hidden, labels, tile=3)):
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
