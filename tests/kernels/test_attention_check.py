"""`dfa-megatron doctor attention`: the functions alone, on ranks over gloo, against dense attention in float64."""

from __future__ import annotations

import pytest

from dfa_megatron.cli.attention_check import TOLERANCE, compared, settings_of
from dfa_megatron.cli.main import build_parser, main
from dfa_megatron.testing.workers import run_ranks
from tests.support import plants

FLAGS = "--ranks 2 --tokens 24 --heads 2 --kv-heads 1 --head-dim 8 --window-size 5 0 --kernel cpu"
PACK = "--ranks 2 --cu-seqlens 0,7,8,40 --layout load_balanced --no-causal --softcap 2 --verify off"


def checks(rank: int, world_size: int) -> list[list[tuple[str, float, str]]]:
    """Of a pack, of a window, and of a window that the kernel ignores."""
    settings = [settings_of(build_parser().parse_args(["doctor", "attention", *x.split()]))[1] for x in (PACK, FLAGS)]
    rows = [compared(each, rank, world_size) for each in settings]
    plants.a_kernel_ignores_the_window()
    return [*rows, compared(settings[1], rank, world_size)]


def test_a_right_attention_is_right_and_a_window_that_a_kernel_ignores_is_found() -> None:
    for pack, window, wrong in run_ranks(2, checks):
        assert [name for name, *_ in pack] == ["out", "lse", "dq", "dk", "dv"]
        assert all(error <= TOLERANCE and not where for _, error, where in (*pack, *window))
        assert wrong[0][1] > TOLERANCE
        assert wrong[0][2] == "rank 0, token 6"


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
    assert main(["doctor", "attention", *flags.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
