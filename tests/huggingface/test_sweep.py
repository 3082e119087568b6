"""The popular types are exact whole and packed, and a type that differs is noticed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.huggingface import conftest
from tests.support.workers import preload, run_ranks

POPULAR = (
    *("cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "glm4", "glm4_moe", "gpt2"),
    *("gpt_neox", "granite", "granitemoe", "lfm2", "minimax_m2", "mixtral", "nemotron_h", "olmo2"),
    *("olmo3", "phi", "phi4_multimodal", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "starcoder2"),
)
"""The other popular types are in test_parity.py, test_packed.py, test_hybrids.py and test_parts.py."""

SECTIONS = ("plain", "packed")  # rematerialized in `make models` and in tests of their own

if conftest.INSTALLED:
    preload("tests.huggingface.sweep.attempt")


def states(rank: int, world_size: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    from tests.huggingface.sweep.attempt import attempt

    return {kind: [(v.section, v.state, v.reason) for v in attempt(kind, SECTIONS)] for kind in kinds}


@pytest.mark.support("models", "the popular types of the sweep: whole and packed")
def test_popular_types_are_exact_whole_and_packed() -> None:
    for found in run_ranks(2, states, POPULAR, timeout=150):
        sections = [(section, "exact", "") for section in SECTIONS]
        assert found == dict.fromkeys(POPULAR, sections)


def planted(rank: int, world_size: int) -> dict[str, Any]:
    from dfa_megatron.huggingface import attention_function as attention

    real = attention.dist_flash_attn_func
    vars(attention)["dist_flash_attn_func"] = lambda *x, **y: real(
        *x, **{**y, "softmax_scale": 0.9 * y["softmax_scale"]}
    )
    return states(rank, world_size, ("llama",))


def test_a_type_that_differs_is_wrong_on_every_rank() -> None:
    for found in run_ranks(2, planted, timeout=100):
        assert [state for _, state, _ in found["llama"]] == ["wrong"]
