"""The code of the pages that needs transformers runs as it stands there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import TrainingConfig
from dfa_megatron import huggingface as dfa_hf
from tests.support import pages
from tests.support.models import VOCABULARY, build, text


@pytest.mark.parametrize("block", pages.WITH_TRANSFORMERS)
def test_the_code_of_a_page_runs_with_transformers(block: pages.Block) -> None:
    model = build("Llama")
    whole = text(1, 12, seed=0)
    names: dict[str, Any] = {
        "model": model, "group": None, "ids": whole["input_ids"], "prompts": {"input_ids": whole["input_ids"]},
        "labels": whole["labels"], "positions": torch.tensor([[*range(5), *range(7)]]), "cu_seqlens": (0, 5, 12),
        "dfa_hf": dfa_hf, "TrainingConfig": TrainingConfig,
    }  # fmt: skip
    if block == ("docs/loss.md", "by_document"):
        dfa_hf.distribute_attention(model, config=TrainingConfig(loss_tile=4))
        names["batch"] = whole
        names |= {"hidden": torch.randn(1, 12, 8), "weight": torch.randn(VOCABULARY, 8), "tp_group": None}
    elif block == ("docs/huggingface.md", "local_attention"):
        dfa_hf.distribute_attention(model)
        model.generate = lambda *_: model(input_ids=whole["input_ids"])
    found = pages.run(block, names)
    if block[0] == "docs/trees.md":
        assert [len(own) for own in found["logprobs"].values()] == [5, 6, 3, 4]
        alone = build("Llama")(torch.tensor([found["rollouts"][1]])).logits.log_softmax(-1)[0, range(2, 5), [7, 9, 4]]
        torch.testing.assert_close(found["logprobs"][1][3:], alone, rtol=1e-4, atol=1e-4)
    elif "logprobs" in found:
        assert [len(x[0]) for x in found["logprobs"]] == [5, 7]
        wanted = -torch.nn.functional.cross_entropy(
            build("Llama")(whole["input_ids"]).logits[0, :-1], whole["labels"][0, 1:], reduction="none"
        )
        torch.testing.assert_close(torch.cat(found["logprobs"], 1)[0, :-1], wanted, rtol=1e-4, atol=1e-4)
    if "loss" in found:
        assert torch.isfinite(found["loss"])
