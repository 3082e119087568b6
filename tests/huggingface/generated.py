"""Compare a generation over ranks with one process's, in float64."""

from __future__ import annotations

from typing import Any

import torch

from dfa_megatron import huggingface as dfa_hf
from tests.huggingface.sweep.attempt import Float64
from tests.huggingface.sweep.tiny import build

ALONE, PADDED = (13, (0,)), (17, (0, 4, 9))
"""Tokens of a prompt, and the padding on the left of each of its rows."""


def generated(model: Any, ids: torch.Tensor, pads: tuple[int, ...], **asked: Any) -> Any:
    """Return what `generate` returns, with logits, for prompts with padding."""
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]).long()
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | asked
    return model.generate(ids * mask, attention_mask=mask, **options, output_logits=True, return_dict_in_generate=True)


def compared(kind: str, prompt: tuple[int, tuple[int, ...]], **asked: Any) -> tuple[bool, float, Any]:
    """Return whether the tokens are one process's, the largest difference of its logits, and the cache."""
    length, pads = prompt
    with Float64():
        model = build(kind).eval()
        ids = torch.randint(3, 90, (len(pads), length), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(5)
        want = generated(model, ids, pads, **asked)
        dfa_hf.distribute_attention(model)
        torch.manual_seed(5)
        got = generated(model, ids, pads, **asked)
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got.logits, want.logits, strict=True))
    return bool(torch.equal(got.sequences, want.sequences)), worst, (got, want)
