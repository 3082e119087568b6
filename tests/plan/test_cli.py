"""`dfa-megatron plan`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dfa_megatron.cli.main import main
from dfa_megatron.plan.language.mask import causal
from dfa_megatron.plan.language.text import from_text
from tests.support.plan_cases import plan_of


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints, or why it refuses: of its words, and of flags that tests write apart."""

    def run(words: str, *flags: str, status: int = 0) -> str:
        assert main([*words.split(), *flags]) == status
        out, error = capsys.readouterr()
        return error if status else out

    return run


Shown = Callable[..., str]


def test_the_command_shows_the_grid_and_the_costs(shown: Shown) -> None:
    out = shown("plan --ranks 8 --schedule balanced --kv-heads 8 --hardware ideal-link")
    assert "   3 5.0* 6.1* 7.2* 3.0  4.1  5.2  6.3  7.4" in out
    assert out.count("idle 11.1 %") == 2
    assert out.count("MB sent") == out.count("MB received") == out.count("peak slots") == 2
    assert plan_of("balanced", causal(65536), 8).digest in out


def test_prove_is_of_a_job_and_one_line_says_how(shown: Shown) -> None:
    (line,) = shown("prove megatron --num-layers 2", status=2).splitlines()
    assert "--dfa-prove" in line
    assert "prove=true" in line


def test_the_report_of_many_ranks_fits_the_width(shown: Shown) -> None:
    lines = shown("plan --ranks 16 --schedule balanced_shared --ulysses-degree 1").splitlines()
    assert max(len(line) for line in lines[1:] if "whose rows" not in line) <= 100
    assert any(line.startswith("MB received") for line in lines)


@pytest.mark.parametrize(("given", "parents"), [("", "-1,0,0"), ("--parents=-1,0,1", "-1,0,1")])
def test_a_tree_is_planned_by_default_one_question_with_answers(given: str, parents: str, shown: Shown) -> None:
    out = shown(f"plan --ranks 2 --seq-length 32 --mask prompt-tree --documents 16,8,8 {given}")
    assert f"prompt tree({parents};16,8,8) over 32 tokens" in out


def test_documents_of_another_length_are_refused_by_the_flag_that_works(shown: Shown) -> None:
    draw = random.Random(0)
    for _ in range(20):
        lengths = [draw.randint(0, 9) for _ in range(draw.randint(0, 4))]
        mask = draw.choice(["documents", "full-documents", "prompt-tree"])
        given = ("--documents", ",".join(map(str, lengths)))
        advice = shown(f"plan --ranks 1 --mask {mask}", *given, status=2).split("What works: ")[1].rstrip(".\n").split()
        shown(f"plan --ranks 1 --mask {mask}", *given, *advice)
        assert (advice[0] == "--seq-length") == (bool(lengths) and 0 not in lengths)


def test_auto_says_what_it_compared(shown: Shown) -> None:
    out = shown("plan --ranks 4 --seq-length 4096 --mask full --layout contiguous")
    assert all(words in out for words in ("auto took ring", "it needs layout 'zigzag'", "pairs causal work only"))


def test_the_explanation_has_every_candidate_with_its_cost_and_reason(shown: Shown) -> None:
    out = shown("plan --ranks 4 --seq-length 131072 --heads 6 --schedule ring --explain")
    table = out.split("the candidates on h200-nvlink")[1].splitlines()
    assert "taken: the cheapest" in next(line for line in table if line.startswith("* balanced_shared"))
    rows = {line[2:].split("  ")[0].strip(): line for line in table[2:]}
    assert {"ring", "owner_computes on zigzag", "greedy"} <= set(rows)
    assert "% slower" in rows["ring"]
    assert "is even" in rows["greedy"]


def test_nodes_can_be_asked_for(shown: Shown) -> None:
    flags = "plan --ranks 16 --seq-length 65536 --ulysses-degree 1 --hardware"
    out = shown(f"{flags} h200-nic-400g")
    assert "simulated on h200-nic-400g" in out
    assert ", gateway" in out
    assert "one of h200-nvlink" in shown(f"{flags} mine.json", status=2)


def test_files_are_written_and_the_plan_reads_back(tmp_path: Path, shown: Shown) -> None:
    svg, text = tmp_path / "a.svg", tmp_path / "a.plan"
    out = shown(f"plan --ranks 3 --seq-length 96 --schedule balanced --link 50 --svg {svg} --text {text}")
    assert from_text(text.read_text()) == plan_of("balanced", causal(96), 3)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")  # noqa: S314 we wrote it ourselves
    assert "h200-nvlink at 50 GB/s" in out


@pytest.mark.parametrize(
    "mask",
    [
        "causal", "full", "window --window-size 9 0", "documents --documents 10,40,46", "prefix --prefix 7",
        "full-documents --documents 10,40,46", "window-documents --documents 10,40,46 --window-size 5 3",
        "prefix-documents --documents 10,40,46 --prefix 7", "causal-blockwise --documents 10,40,46",
        "block-causal --documents 10,40,46 --block 8", "global-window --window-size 5 0 --prefix 7",
    ],
)  # fmt: skip
def test_every_mask_can_be_shown(mask: str, shown: Shown) -> None:
    assert "step r0" in shown(f"plan --ranks 4 --seq-length 96 --mask {mask}")


@pytest.mark.parametrize(
    ("flag", "content", "said"),
    [
        ("--tree", '{"lengths": [16, 8, 8], "parents": [-1, 0, 0]}', "prompt tree(-1,0,0;16,8,8) over 32 tokens"),
        ("--mask", '{"length": 32, "tiles": [[0, 32, 0, 9, null, null], [0, 32, 0, 32, -3, 0]]}', "a over 32 tokens"),
        ("--mask", '{"length": 32, "tiles": [[0, 32, 0, 9]]}', "not enough values to unpack"),
        ("--mask", '{"length": 32, "tiles": [[0, 2.5, 0, 9, null, 0]]}', "a number is not whole"),
        ("--mask", '{"length": 32, "tile": []}', "it lacks 'tiles'. What works: {\"length\": 32"),
        ("--tree", '{"lengths": [16, 8], "parents": [-1, 4]}', "the parent of segment 1 is -1, 0 or an ancestor of 0"),
        ("--tree", "[1, 2", "delimiter"),
    ],
)
def test_a_tree_or_a_union_of_tiles_is_read_from_a_file(
    flag: str, content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(content)
    status = main(["plan", "--ranks", "2", flag, str(tmp_path / "a.json")])
    out, error = capsys.readouterr()
    assert said in (error if status else out)
    assert status == (0 if "over 32 tokens" in said else 2)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--schedule circle", "one of auto, ring, balanced, balanced_shared, greedy"),
        (
            "--mask polka",
            "one of causal, full, window, documents, full-documents, window-documents, prefix, prefix-doc",
        ),
        ("--hardware abacus", "one of h200-nvlink"),
        ("--seq-length 0", "positive length, got 0"),
        ("--heads 6 --kv-heads 4", "6 heads with 4 kv_heads"),
        ("--ranks 0", "at least one"),
        ("--mask full --schedule balanced", "pairs causal work only"),
        ("--mask documents --documents 1,2", "add up to 3 tokens, --seq-length is 65536"),
        ("--mask documents --documents 1,b", "invalid literal"),
        ("--link 0", "--link 0: it must be positive and finite"),
        ("--svg /nowhere/at/all.svg", "No such file or directory"),
    ],
)
def test_a_bad_value_is_one_clear_line_and_exit_status_2(arguments: str, complaint: str, shown: Shown) -> None:
    error = shown(f"plan {arguments}", status=2)
    assert complaint in error
    assert "Traceback" not in error
