"""The self-check of a transformers config finds what is planted, and finds nothing where nothing is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.selfcheck.command import case_of
from dfa_megatron.selfcheck.run_case import DIFFERS, RIGHT, Report, check_planted
from dfa_megatron.selfcheck.table import text
from tests.huggingface import plants
from tests.support import plants as of_kernels

MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "sliding_window": 10240,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "intermediate_size": 512,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_experts": 0,
}

PLANTED = {
    plants.the_mask_is_dropped: "plain, output of attention: layer 0 on rank 0, token 0,",
    plants.the_window_is_dropped: "plain, output of attention: layer 0 on rank 0, token 10,",
    plants.rope_has_no_offset: "plain, q, k, v: layer 0 q on rank 1, token 16,",
    plants.labels_are_shifted_inside_chunks: "plain, loss of each token: every token on rank 0, token 15,",
    plants.the_loss_is_scaled_by_the_ranks: "plain, loss: mean of the batch on rank 0",
    plants.one_rank_has_another_plan: "DisagreementError",
    plants.the_optimizer_steps_on_unreduced_gradients: "three steps, norm of the gradient: step 1",
    of_kernels.a_kernel_ignores_the_window: "plain, output of attention: layer 0 on rank 0, token 10,",
    of_kernels.the_backward_has_stale_keys: "plain, gradients of q, k, v: layer 0 d",
    of_kernels.a_rank_dies: "the run: rank 1 ended with the process ended with status 9",
}
"""Each fault, and what the first difference must say."""


def written(folder: Path, values: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """One with nothing planted, and one for each fault; the reference runs once."""
    path = written(tmp_path_factory.mktemp("model"), MISTRAL)
    names = ["nothing", *(fault.__name__ for fault in PLANTED)]
    found = check_planted(case_of([path, "--dfa-checkpoint", "full"]), [(), *([fault] for fault in PLANTED)])
    return dict(zip(names, found, strict=True))


def test_where_nothing_is_wrong_all_rows_are_equal(reports: dict[str, Report]) -> None:
    report = reports["nothing"]
    assert report.status == RIGHT, text(report)
    compared = {(row.section, row.kind) for row in report.comparison.rows}
    for section in ("plain", "rematerialized"):
        for kind in ("q, k, v", "output of attention", "logits", "gradients of q, k, v", "gradients of parameters"):
            assert (section, kind) in compared
        assert {(section, "loss"), (section, "evaluation: logits"), (section, "evaluation: loss")} <= compared
    assert {kind for section, kind in compared if section == "three steps"} == {
        "loss",
        "norm of the gradient",
        "change of parameters",
    }
    assert "differs" not in text(report)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_where_it_is(fault: Any, reports: dict[str, Report]) -> None:
    report = reports[fault.__name__]
    assert report.status == DIFFERS
    assert PLANTED[fault] in text(report).partition("first difference: ")[2], text(report)


def test_a_hybrid_is_right_and_a_dropped_state_is_found_at_the_first_token_that_misses_it(tmp_path: Path) -> None:
    case = case_of([written(tmp_path, QWEN3_NEXT)])
    assert case.settings["config"]["linear_num_value_heads"] == 2 * case.settings["config"]["linear_num_key_heads"] == 4
    passes = replace(case, sections={"plain": "plain"})  # the others run through DeepSpeed
    right, wrong = check_planted(passes, [(), [of_kernels.the_incoming_state_is_dropped]])
    assert right.status == RIGHT, text(right)
    assert "output of states" in {row.kind for row in right.comparison.rows}
    assert wrong.status == DIFFERS
    assert "plain, output of states: model.layers.0.linear_attn on rank 1, token 16," in text(wrong), text(wrong)


def test_a_model_is_made_small_and_keeps_its_heads_windows_pattern_rope_and_cap(tmp_path: Path) -> None:
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    given = {
        "model_type": "gemma3_text",
        "hidden_size": 2304,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "num_hidden_layers": 24,
        "layer_types": kinds,
        "rope_parameters": rope,
        "attn_logit_softcapping": 30.0,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    }
    case = case_of([written(tmp_path, given), "--ranks", "8", "--tokens", "8192"])
    small = case.settings["config"]
    assert case.ranks == 8
    assert small["num_attention_heads"] == 3 * small["num_key_value_heads"] == 6
    assert (small["sliding_window"], small["layer_types"]) == (16, kinds[:6])
    assert (small["rope_parameters"], small["attn_logit_softcapping"]) == (rope, 30.0)
    assert max(small["hidden_size"], small["vocab_size"]) < 100


@pytest.mark.parametrize(
    ("changes", "words", "said"),
    [
        ({"model_type": "no-such-type"}, [], "no such type"),
        ({}, ["--ranks", "33"], "at most 32"),
        ({}, ["--dfa-data-layout", "zigzag"], "layout"),
        ({}, ["--rank", "2"], "unrecognized arguments: --rank 2"),
        ({}, ["--dfa-remat-offload"], "remat_offload"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    changes: dict[str, Any], words: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        case_of([written(tmp_path, MISTRAL | changes), *words])
    with pytest.raises(UnsupportedError, match="it is no JSON object"):
        case_of([__file__])


def test_dropout_of_attention_is_left_to_be_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"model_type": "gpt2", "resid_pdrop": 0.1, "attn_pdrop": 0.2})
    small = case_of([path]).settings["config"]
    assert (small["resid_pdrop"], small["attn_pdrop"]) == (0.0, 0.2)
