"""Layers with attention code of their own run ours, and what is not understood in such code is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.testing.dense import assert_close
from tests.support.models import build, text

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def falcon(**changes: Any) -> Any:
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    return FalconForCausalLM(FalconConfig(**SMALL, ffn_hidden_size=24, **changes))


def test_a_model_with_code_of_its_own_computes_ours_and_its_own_again_locally() -> None:
    reference, batch = falcon().double(), text(2, 12, seed=1)
    model = dfa_hf.distribute_attention(copy.deepcopy(reference))
    want = reference(**batch).logits
    assert_close(model(**dfa_hf.shard_batch(batch)).logits, want, tolerance=1e-5, name="ours")
    with dfa_hf.local_attention(model):
        assert torch.equal(model(**batch).logits, want)
        assert model.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 14)
    dfa_hf.distribute_attention(model, accelerate=True)
    assert torch.equal(model.eval()(**batch).logits, want)
    assert_close(model.train()(**dfa_hf.shard_batch(batch)).logits, want, tolerance=1e-5, name="ours again")


def test_rows_of_documents_that_begin_at_other_places_are_refused_where_the_table_is_of_one_row() -> None:
    dropped = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
    model = dfa_hf.distribute_attention(build("RoFormer", is_decoder=True, **dropped))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
    batch = {"input_ids": text(2, 6, seed=1)["input_ids"]}
    model(**dfa_hf.shard_batch({**batch, "position_ids": positions[:1].expand(2, -1)}))
    with pytest.raises(UnsupportedError, match="rows with documents of other lengths"):
        model(**dfa_hf.shard_batch({**batch, "position_ids": positions}))


def test_what_is_not_understood_in_such_code_is_refused() -> None:
    model = dfa_hf.distribute_attention(falcon(alibi=True))
    with pytest.raises(UnsupportedError, match="position_bias in a layer of type FalconAttention"):
        model(**dfa_hf.shard_batch(text(1, 12, seed=1)))

    from dfa_megatron.huggingface.own_code.noted_scores import Scores

    x = torch.ones(1, 2, 3, 4)
    scores = Scores("SomeAttention", x, x, torch.Size((1, 2, 3, 3)), lambda scores, value: value)
    for change in (
        lambda: scores.masked_fill(x > 0, -1e38),
        lambda: torch.where(x > 0, scores, x),
        lambda: scores.log(),
    ):
        with pytest.raises(UnsupportedError, match=r"in the attention of a layer of type SomeAttention"):
            change()
    assert not hasattr(scores, "ds_param_alias"), "DeepSpeed asks what a layer returns for it"
    with pytest.raises(UnsupportedError, match=r"attention dropout 0\.1"):
        torch.nn.Dropout(0.1)(scores)
    with pytest.raises(UnsupportedError, match="position_bias in a layer of type SomeAttention"):
        scores + x
    sees, low = torch.ones(1, 1, 3, 3).tril().bool(), torch.tensor(-1e38)
    assert torch.where(sees.triu(-1), scores, low).seen == 2
    for hidden, least in ((sees.logical_not(), low), (sees, torch.tensor(0.0)), (sees.clone().fill_(True), low)):
        with pytest.raises(UnsupportedError, match="where in the attention"):
            torch.where(hidden, scores, least)
    assert torch.equal(torch.nn.Softmax(-1)((scores / 2).float()) @ x, x)
