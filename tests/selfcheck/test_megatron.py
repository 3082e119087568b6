"""The self-check of Megatron's flags finds what is planted, and finds nothing where nothing is."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("megatron.core")

from dfa_megatron.megatron.selfcheck.shrink import case_of
from dfa_megatron.selfcheck.run_case import DIFFERS, RIGHT, Report, check_planted
from dfa_megatron.selfcheck.table import text
from tests.support import plants

FLAGS = """
--transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --ffn-hidden-size 48 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2
--context-parallel-size 2 --attention-dropout 0.0 --hidden-dropout 0.0 --position-embedding-type rope
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
--no-create-attention-mask-in-dataloader --vocab-size 64 --window-size 11,0 --cp-comm-type dfa --spec
dfa_megatron.megatron get_spec
"""

PLANTED = {
    plants.context_parallelism_is_not_active: "context-parallel ranks of each attention: 1, asked for: 2",
    plants.the_mask_is_dropped: "plain, output of attention: layer 1 on rank 0, token 0,",
    plants.the_window_is_dropped: "plain, output of attention: layer 1 on rank 0, token 12,",
    plants.rope_has_no_offset: "plain, q, k, v: layer 1 q on rank 0, token 8,",
    plants.labels_are_shifted_inside_chunks: "plain, loss of each token: every token on rank 0, token 7,",
    plants.the_loss_is_scaled_by_the_ranks: "plain, gradients of q, k, v: layer 2 d",
    plants.one_rank_has_another_plan: "DisagreementError",
    plants.a_kernel_ignores_the_window: "plain, output of attention: layer 1 on rank 0, token 12,",
    plants.the_backward_has_stale_keys: "plain, gradients of q, k, v: layer 1 d",
    plants.the_optimizer_steps_on_unreduced_gradients: "three steps, norm of the gradient: step 1",
    plants.a_rank_dies: "the run: rank 1 ended with",
}
"""Each fault, and what the first difference must say."""


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    """One with nothing planted, and one for each fault; the reference runs once."""
    names = ["nothing", *(fault.__name__ for fault in PLANTED)]
    found = check_planted(case_of(FLAGS.split()), [(), *([fault] for fault in PLANTED)])
    return dict(zip(names, found, strict=True))


def test_where_nothing_is_wrong_all_rows_are_equal(reports: dict[str, Report]) -> None:
    report = reports["nothing"]
    assert report.status == RIGHT, text(report)
    compared = {(row.section, row.kind) for row in report.comparison.rows}
    for section in ("plain", "rematerialized"):
        for kind in ("q, k, v", "output of attention", "gradients of q, k, v", "gradients of parameters", "loss"):
            assert (section, kind) in compared
        assert (section, "evaluation: loss of each token") in compared
    assert {kind for section, kind in compared if section == "three steps"} == {
        "loss",
        "norm of the gradient",
        "change of parameters",
    }
    assert "differs" not in text(report)
    assert "2 ranks compute what one rank computes" in text(report)


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_where_it_is(fault: object, reports: dict[str, Report]) -> None:
    report = reports[fault.__name__]  # type: ignore[attr-defined]
    assert report.status == DIFFERS
    assert PLANTED[fault] in text(report).partition("first difference: ")[2], text(report)  # type: ignore[index]


DELTA = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --dfa-data-layout contiguous"
STACK = "--hybrid-override-pattern M-M*-M-M/M --mamba-num-heads 8 --spec dfa_megatron.megatron hybrid_stack_spec"


@pytest.mark.parametrize("flags", [DELTA, STACK], ids=["delta nets", "mamba"])
def test_mixers_are_right_and_a_dropped_state_is_found_at_the_first_token_that_misses_it(flags: str) -> None:
    case = case_of([*FLAGS.split(), *flags.split(), "--swiglu"])
    config = case.settings["config"]
    if flags is DELTA:
        assert config["linear_num_value_heads"] == 2 * config["linear_num_key_heads"] == 4
    else:
        assert (case.settings["model"]["pattern"], config["num_layers"], config["mamba_num_heads"]) == ("M-*M", 4, 4)
    passes = replace(case, sections={"plain": "plain", "rematerialized": "plain"})
    right, wrong = check_planted(passes, [(), [plants.the_incoming_state_is_dropped]])
    assert right.status == RIGHT, text(right)
    assert "output of states" in {row.kind for row in right.comparison.rows}
    assert wrong.status == DIFFERS
    assert "plain, output of states: layer 1 on rank 1, token 16," in text(wrong), text(wrong)
