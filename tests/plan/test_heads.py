"""Who computes which heads of which tokens when neighbours share theirs: by brute force, and refused by name."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dfa_megatron.cli.main import main
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.hardware import H200_NIC_400G, H200_NVLINK, H200_SLOW_LINK, H200_SOCKETS
from dfa_megatron.plan.degree import automatic_degree, check_degree, split_heads
from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.mask import causal, documents, full, prefix_lm, sliding_window
from dfa_megatron.runtime.around import rows_in_order
from tests.support.packs import drawn_layout


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 6])
def test_every_query_head_finds_its_kv_head(degree: int) -> None:
    for kv_heads, group in itertools.product(range(1, 9), range(1, 13)):
        heads = kv_heads * group
        if heads % degree:
            continue
        split = split_heads(degree, degree, heads, kv_heads)
        assert split.heads * degree == heads
        assert split.kv_heads * degree == kv_heads * split.copies
        for head in range(heads):
            rank, local = divmod(head, split.heads)
            place = local // (split.heads // split.kv_heads)
            assert (rank * split.kv_heads + place) // split.copies == head // group
        if kv_heads % degree == 0:
            assert split.copies == 1, "nothing is copied that need not be"
        if degree % kv_heads == 0:
            assert split.kv_heads == 1


@pytest.mark.parametrize("seed", range(40))
def test_rows_that_come_are_put_in_the_order_of_the_plan(seed: int) -> None:
    draw = random.Random(seed)
    degree = draw.choice((2, 3, 4))
    ranks = degree * draw.choice((1, 2, 3))
    held = drawn_layout(draw, ranks, draw.randint(ranks, 12 * ranks))
    for first in range(0, ranks, degree):
        near = range(first, first + degree)
        sent = [token for rank in near for token in held.positions(rank)]
        order = rows_in_order(held, near) or (Span(0, len(sent)),)
        came = [token for rows in order for token in sent[rows.lo : rows.hi]]
        assert came == held.merged(degree).positions(first // degree)


@pytest.mark.parametrize(
    ("degree", "ranks", "heads", "said"),
    [
        (2, 4, 33, r"ulysses_degree=2 with 33 heads.*as many heads.*divides both 4 ranks and 33 heads: 1\."),
        (4, 4, 6, r"ulysses_degree=4 with 6 heads.*6 heads: 1, 2\."),
        (3, 4, 12, r"ulysses_degree=3 on a group of 4 ranks.*12 heads: 1, 2, 4\."),
        (0, 4, 12, r"ulysses_degree=0"),
        (8, 4, 8, r"ulysses_degree=8 on a group of 4 ranks"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused_with_those_that_do(
    degree: int, ranks: int, heads: int, said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check_degree(degree, ranks, heads)


def test_the_command_shows_the_tokens_that_neighbours_bring_together(tmp_path: Path) -> None:
    """Two of 14 tokens' four parts are 8 and 6, where two ranks alone would hold 7 each."""
    text = tmp_path / "plan.txt"
    assert main(["plan", "--ranks", "4", "--seq-length", "14", "--ulysses-degree", "2", "--text", str(text)]) == 0
    chunks = json.loads(text.read_text().splitlines()[0])["chunks"]
    assert {owner for first, _, owner in chunks if first < 8} == {0}
    assert chunks[-1][1:] == [14, 1]


def test_the_command_shows_the_plan_inside(capsys: pytest.CaptureFixture[str]) -> None:
    for degree in ("4", "1"):
        shape = ["--heads", "32", "--kv-heads", "2", "--seq-length", "8192", "--schedule", "balanced"]
        assert main(["plan", "--ranks", "8", "--ulysses-degree", degree, *shape]) == 0
        out = capsys.readouterr().out
        assert ("neighbours" in out) == (degree == "4")
        inside = "balanced of causal over 8192 tokens on 2 ranks", "of 2 ranks with 8 heads and 1 kv heads"
        assert degree == "1" or all(words in out for words in (*inside, "4 neighbours each of 8 ranks"))


def test_the_command_takes_a_degree_chooses_one_and_refuses_wrong_ones(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--ranks", "4", "--heads", "8", "--head-dim", "64", "--ulysses-degree", "auto"]
    for length, hardware, degree in (("131072", "h200-nvlink-flash4", 1), ("32768", "h200-slow-link-flash4", 4)):
        assert main([*flags, "--layout", "contiguous", "--seq-length", length, "--hardware", hardware]) == 0
        out = capsys.readouterr().out
        assert ("neighbours each of" in out) == (degree > 1)
        assert f"ulysses_degree=auto is {degree} here" in out
    assert main(["plan", "--ranks", "8", "--ulysses-degree", "3"]) != 0
    assert "divides both 8 ranks and 32 heads: 1, 2, 4, 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "length", "kv_heads", "degree"),
    [
        (4, 32768, 32, 4),  # measured: 0.79 of the time
        (4, 131072, 32, 1),  # 1.10
        (4, 131072, 8, 1),  # 1.10
        (4, 32768, 8, 4),  # 0.91
        (2, 32768, 32, 1),  # 1.09 with a plain Ulysses
        (8, 32768, 32, 8),
    ],
)
def test_on_a_slow_link_ranks_exchange_heads_where_they_wait(
    ranks: int, length: int, kv_heads: int, degree: int
) -> None:
    assert automatic_degree(causal(length), ranks, 32, kv_heads, "auto", H200_SLOW_LINK) == degree


def test_over_nvlink_only_many_short_ranks_exchange_heads() -> None:
    for ranks, length, degree in ((2, 2048, 1), (4, 2048, 1), (8, 8192, 8), (8, 16384, 8), (8, 65536, 1)):
        assert automatic_degree(causal(length), ranks, 32, 8, "auto", H200_NVLINK) == degree


def test_packs_windows_masks_and_named_schedules_exchange_no_heads(capsys: pytest.CaptureFixture[str]) -> None:
    for mask, schedule, degree in (
        (causal(32768), "auto", 4),
        (full(32768), "auto", 4),
        (causal(32768), "ring", 1),
        (documents([16384, 16384]), "auto", 1),
        (sliding_window(32768, 4096), "auto", 1),
        (prefix_lm(32768, 100), "auto", 1),
    ):
        assert automatic_degree(mask, 4, 32, 32, schedule, H200_SLOW_LINK) == degree, mask.name
    flags = ["plan", "--ranks", "4", "--seq-length", "32768", "--hardware", "h200-slow-link", "--mask", "window"]
    assert main([*flags, "--ulysses-degree", "auto"]) == 0
    assert "ulysses_degree=auto is 1 here" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(30))
def test_every_automatic_degree_can_be_run(seed: int) -> None:
    draw = random.Random(seed)
    ranks, kv_heads = draw.randint(1, 64), draw.randint(1, 40)
    heads = kv_heads * draw.choice((1, 2, 5))
    nodes = draw.choice((None, 1, 2, 3, 8))
    for profile in (H200_NVLINK, H200_SLOW_LINK, H200_SOCKETS, H200_NIC_400G):
        hardware = profile if nodes is None else replace(profile, ranks_per_node=nodes)
        mask = draw.choice((causal, full))(ranks * draw.choice((1, 500, 5000, 10**6)))
        degree = automatic_degree(mask, ranks, heads, kv_heads, "auto", hardware)
        check_degree(degree, ranks, heads)
        assert degree == 1 or profile is not H200_SLOW_LINK or degree <= kv_heads
