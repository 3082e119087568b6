"""The argument files of configs/megatron: what they say, and how they are read."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from dfa_megatron import launch
from dfa_megatron.launch import expand, read_arguments
from tests.support.arguments import assert_refused

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"
HYBRID = CONFIGS / "nemotron-h-8b.args"
TRAINING = sorted((CONFIGS / "training").glob("*.args"))
BILLIONS = {"llama-7b": 6.74, "llama-3-8b": 8.03, "qwen3-8b": 8.19}
"""What the models' authors say."""


def billions(flags: list[str]) -> float:
    """Parameters of a dense model in 10^9, rounded."""
    given = {name: int(value) for name, value in pairwise(flags) if value.isdigit()}
    width, heads, vocabulary = (given[f"--{name}"] for name in ("hidden-size", "num-attention-heads", "vocab-size"))
    head_dim, kv_heads = given.get("--kv-channels", width // heads), given.get("--num-query-groups", heads)
    layer = 2 * width * (heads + kv_heads) * head_dim + 3 * width * given["--ffn-hidden-size"] + 2 * width
    assert {"--swiglu", "--untie-embeddings-and-output-weights"} <= set(flags)
    return round((given["--num-layers"] * layer + 2 * -(-vocabulary // 128) * 128 * width + width) / 1e9, 2)


def test_the_models_and_what_trains_them_are_there() -> None:
    assert {path.stem for path in CONFIGS.glob("*.args")} == {*BILLIONS, HYBRID.stem}
    assert {path.stem for path in TRAINING} == {"mock", "pretrain"}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_file_is_the_model_that_it_names(name: str) -> None:
    flags = read_arguments(CONFIGS / f"{name}.args")
    assert billions(flags) == BILLIONS[name]
    for said in ("--spec dfa_megatron.megatron get_spec", "--cp-comm-type dfa", "--recompute-granularity full"):
        assert said in " ".join(flags)
    for training in TRAINING:
        names = [word for word in (*flags, *read_arguments(training)) if word.startswith("--")]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "size"), [("GQA", 5.93), ("33H", 7.02), ("16H", 5.53)]
)  # as follows from their shapes
def test_the_papers_other_models_are_flags_after_its_first(name: str, size: float) -> None:
    path = CONFIGS / "llama-7b.args"
    stated = re.search(rf"^#   LLaMA-{name} +(--\S.*?)(?:   |$)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert stated is not None
    assert billions([*read_arguments(path), *stated[1].split()]) == size


@pytest.mark.parametrize(
    ("text", "complaint"), [("num-layers 2", "a line begins with a flag"), ("--data-path 'a", "No closing quotation")]
)
def test_a_bad_file_is_refused_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.args").write_text(text + "\n")
    assert_refused(complaint, read_arguments, tmp_path / "a.args")


def test_an_argument_file_stands_for_its_flags_and_comments_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.args"
    path.write_text("# a model\n--num-layers 2  # not many\n\n--data-path 'with a space'\n--swiglu\n")
    found = expand(["--lr", "1", f"@{path}", "--num-layers", "4"])
    assert found == ["--lr", "1", "--num-layers", "2", "--data-path", "with a space", "--swiglu", "--num-layers", "4"]
    path.write_text("x")
    assert_refused(r"a\.args:1: x", expand, [f"@{path}"])


def test_the_launcher_says_which_argument_file_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('the script ran')")
    assert launch.main([str(tmp_path / "pretrain_gpt.py"), "@/none/such.args"]) == 2
    assert "/none/such.args" in capsys.readouterr().err
