"""Who computes which heads of which tokens when neighbours share theirs: by brute force, and refused by name."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dfa_megatron.cli.main import main
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language import layout as layouts
from dfa_megatron.plan.language.shape import AttentionShape, check_degree, split_heads, split_tokens


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


def tokens_of(layout: str, length: int, ranks: int, rank: int) -> list[int]:
    return [token for span in layouts.by_name(layout, length, ranks).spans(rank) for token in range(span.lo, span.hi)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (4, 2), (6, 2), (6, 3), (8, 4), (5, 5), (7, 1)])
def test_gathered_tokens_are_those_of_a_rank_of_the_plan(layout: str, ranks: int, degree: int) -> None:
    rows = 6
    for rank in range(ranks):
        split = split_tokens(degree, rank, layouts.by_name(layout, ranks * rows, ranks))
        theirs = [tokens_of(layout, ranks * rows, ranks, other) for other in split.exchange_group]
        in_order = [token for one in theirs for token in one]
        gathered = [token for at, part in split.gathered for token in theirs[at][part.lo : part.hi]] or in_order
        assert gathered == tokens_of(layout, ranks * rows, len(split.plan_group), split.plan_group.index(rank))
        if split.gathered:
            back = [token for _, part in split.returned for token in gathered[part.lo : part.hi]]
            assert back == in_order, "and they find their way back"
        else:
            assert layout == "contiguous" or degree == 1


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


def test_neighbours_of_any_layout_make_a_whole_and_two_sequences_do_not() -> None:
    held = layouts.Layout(layouts.cut(23, 8), tuple(3 * chunk % 4 for chunk in range(8)))
    for rank in range(4):
        split = split_tokens(2, rank, held)
        theirs = [held.positions(other) for other in split.exchange_group]
        gathered = [token for at, part in split.gathered for token in theirs[at][part.lo : part.hi]]
        assert gathered == held.merged(2).positions(rank // 2)
        assert [token for _, part in split.returned for token in gathered[part.lo : part.hi]] == [
            token for one in theirs for token in one
        ]
    with pytest.raises(UnsupportedError, match="for two sequences"):
        split_tokens(2, 0, layouts.cross(held, held))


def test_the_command_shows_the_tokens_that_neighbours_bring_together(tmp_path: Path) -> None:
    """Two of 14 tokens' four parts are 8 and 6, where two ranks alone would hold 7 each."""
    text = tmp_path / "plan.txt"
    assert main(["plan", "--ranks", "4", "--seq-length", "14", "--ulysses-degree", "2", "--text", str(text)]) == 0
    (chunks,) = (line for line in text.read_text().splitlines() if line.startswith("chunks "))
    assert {word.partition("@")[2] for word in chunks.split()[1:] if int(word.split(":")[0]) < 8} == {"0"}
    assert "8:14@1" in chunks or ":14@1" in chunks


def test_what_is_sent_is_what_the_other_ranks_compute() -> None:
    whole = AttentionShape(batch=3, heads=8, kv_heads=2, head_dim=16, head_dim_v=12)
    split = split_heads(4, 8, 8, 2)
    assert split.shape(whole) == AttentionShape(batch=3, heads=2, kv_heads=1, head_dim=16, head_dim_v=12)
    row = 2 * (16 * 2 + 16 + 12)  # q, k and v of two query heads and a kv head, in 2 bytes
    out = 2 * 12 * 2
    assert split.sent(whole, 10) == (3 * 3 * 10 * (row + out + 8), 3 * 3 * 10 * (row + 2 * out + 8 + row))
    assert split.sent(whole, 10, kept=True) == split.sent(whole, 10), "copies of kv heads are not kept"
    dense = split_heads(2, 8, 8, 2)
    assert dense.sent(whole, 10, kept=True)[1] < dense.sent(whole, 10)[1]
    assert split_heads(1, 8, 8, 2).sent(whole, 10) == (0, 0)


def test_the_command_shows_the_plan_inside_and_what_the_exchange_costs(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--heads", "32", "--kv-heads", "2", "--seq-length", "8192", "--schedule", "balanced"]
    assert main(["plan", "--ranks", "8", "--ulysses-degree", "4", *shape]) == 0
    out = capsys.readouterr().out
    assert "balanced of causal over 8192 tokens on 2 ranks" in out
    assert "4 neighbours each of 8 ranks" in out
    assert "of 2 ranks with 8 heads and 1 kv heads" in out
    forward = 3 * 1024 * ((8 + 1 + 1 + 8) * 256 + 8 * 4)
    assert f"MB sent     {forward / 1e6:.1f} by every rank around the forward" in out
    shape[3] = "32"
    for remat, again in (("--remat", 3 * 8), ("--no-remat", 0)):  # q, k and v, unless they were kept
        assert main(["plan", "--ranks", "8", "--ulysses-degree", "4", *shape, remat]) == 0
        backward = 3 * 1024 * ((again + 8 + 8 + 3 * 8) * 256 + 8 * 4)
        assert f"{backward / 1e6:.1f} around the backward" in capsys.readouterr().out
    assert main(["plan", "--ranks", "8", "--ulysses-degree", "1", *shape]) == 0
    assert "neighbours" not in capsys.readouterr().out


def cheapest_degree(out: str) -> int:
    """Return the degree in the first row of the table of --explain."""
    row = out.partition("the candidates on ")[2].splitlines()[2]
    found = re.search(r"ulysses (\d+)", row)
    return int(found[1]) if found else 1


def test_the_command_takes_a_degree_chooses_one_and_refuses_wrong_ones(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--ranks", "4", "--seq-length", "4096", "--heads", "8", "--head-dim", "64", "--ulysses-degree"]
    for length, hardware, degree in (("131072", "h200-nvlink-flash4", 1), ("32768", "h200-slow-link-flash4", 4)):
        given = ["--no-remat", "--layout", "contiguous", "--seq-length", length, "--hardware", hardware, "--explain"]
        assert main([*flags, "auto", *given]) == 0
        out = capsys.readouterr().out
        assert cheapest_degree(out) == degree
        assert ("neighbours each of" in out, f"ulysses_degree=auto is {degree} here" in out) == (degree > 1, degree > 1)
    slow = ["--ranks", "4", "--seq-length", "32768", "--hardware", "h200-slow-link-flash4", "--backward-needs", "delta"]
    slow += ["--kv-heads", "8"]
    for remat, degree in (("--remat", 1), ("--no-remat", 4)):  # heads that are exchanged once more cost what they save
        assert main(["plan", *slow, "--layout", "contiguous", "--explain", remat]) == 0
        assert cheapest_degree(capsys.readouterr().out) == degree
    # A link of that rate is one for all-to-alls too.
    longer = ["plan", *slow, "--seq-length", "65536", "--kv-heads", "32", "--layout", "contiguous", "--explain"]
    for link, degree in (([], 4), (["--link", "24"], 1)):
        assert main([*longer, "--no-remat", *link]) == 0
        assert cheapest_degree(capsys.readouterr().out) == degree
    for arguments, said in ((["--ulysses-degree", "3"], "divides both 8 ranks and 32 heads: 1, 2, 4, 8"),):
        assert main(["plan", "--ranks", "8", *arguments]) != 0
        assert said in capsys.readouterr().err
