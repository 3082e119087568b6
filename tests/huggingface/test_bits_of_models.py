"""Logits of whole models are the same bits at any number of ranks, where linear layers compute tiles of one shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from tests.huggingface.sweep.tiny import build
from tests.support import pages
from tests.support.workers import by_turns, run_ranks

KINDS = ("llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral")
"""Plain, with grouped heads, windows, sinks, experts."""
TOKENS = 301


def batch_of(form: str) -> dict[str, Any]:
    ids = torch.randint(1, 90, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    if form == "packed":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(hi) for hi in (1, 150, 37, 113)])[None]}
    return {"input_ids": ids} | ({"prompt_tree": ((100, 120, 81), (-1, 0, 0))} if form == "tree" else {})


CASES = [
    *((kind, form, "float32") for kind in KINDS for form in ("whole", "packed")),
    ("llama", "tree", "float32"),
    ("qwen3", "packed", "bfloat16"),
]


def tiles() -> TorchFunctionMode:
    """Return the page's mode."""
    names: dict[str, Any] = {"ids": torch.ones(1, 1, dtype=torch.long), "model": lambda **_: _Nothing}
    mode: TorchFunctionMode = pages.run(("docs/same-bits.md", "RowsInTiles"), names)["RowsInTiles"]()
    return mode


class _Nothing:
    logits = None


def logits_of(rank: int, ranks: int) -> list[torch.Tensor]:
    """Return the logits of this rank's tokens, of every case."""
    found = list[torch.Tensor]()
    for kind, form, dtype in by_turns(CASES):
        model = build(kind).to(getattr(torch, dtype)).eval()
        dfa_hf.distribute_attention(model, config=TrainingConfig(numerics="invariant"))
        with torch.no_grad(), tiles():
            found.append(model(**batch_of(form)).logits)
    return found


@pytest.mark.support("models", "the same bits of logits at any number of ranks")
def test_logits_have_the_same_bits_at_any_number_of_ranks() -> None:
    (one,) = run_ranks(1, logits_of, timeout=150.0)
    for ranks in (2, 3, 4):
        many = [torch.cat(parts, 1) for parts in zip(*run_ranks(ranks, logits_of, timeout=150.0), strict=True)]
        differing = [case for case, a, b in zip(by_turns(CASES), one, many, strict=True) if not torch.equal(a, b)]
        assert differing == [], ranks
