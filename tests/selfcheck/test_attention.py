"""`dfa-megatron selfcheck attention`: the functions alone, on ranks over gloo, against dense attention in float64."""

from __future__ import annotations

import pytest

from dfa_megatron.cli.attention_check import case_of
from dfa_megatron.cli.main import main
from dfa_megatron.selfcheck.run_case import DIFFERS, RIGHT, check_planted
from dfa_megatron.selfcheck.table import text
from tests.support import plants

FLAGS = "--ranks 2 --tokens 24 --heads 2 --kv-heads 1 --head-dim 8 --window-size 5 0 --kernel cpu"


def test_a_window_that_a_kernel_ignores_and_a_dropped_mask_are_found() -> None:
    case = case_of(FLAGS.split())
    planted = [(), [plants.a_kernel_ignores_the_window], [plants.the_mask_is_dropped]]
    right, window, mask = check_planted(case, planted)
    assert right.status == RIGHT, text(right)
    assert {row.kind for row in right.comparison.rows} == {"out", "lse", "dq", "dk", "dv"}
    assert window.status == mask.status == DIFFERS
    assert "first difference: attention, out: out on rank 0, token 6," in text(window)
    assert "first difference: attention, out: out on rank 0, token 0," in text(mask)


def test_packed_documents_and_options_of_the_command_line_are_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--ranks 2 --cu-seqlens 0,7,8,40 --layout load_balanced --no-causal --softcap 2 --verify off"
    assert main(["selfcheck", "attention", *flags.split()]) == 0
    assert "40 tokens, 4 heads of 16 over 2, layout load_balanced" in capsys.readouterr().out
    settings = case_of(flags.split()).settings
    assert (settings["layout"], settings["config"]["verify"]) == ("load_balanced", "off")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ranks 64", "1 to 32"),
        ("--heads 3 --kv-heads 2", "key/value heads divide the heads"),
        ("--ranks 3 --tokens 10", "must divide among 3 ranks"),
        ("--batch 2 --cu-seqlens 0,4", "a pack is one row"),
    ],
)
def test_an_attention_that_cannot_run_is_one_line_and_status_2(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selfcheck", "attention", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
