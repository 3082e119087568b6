"""The argument files of configs/megatron: what they say, how they are read, and the plan and memory they lead to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dfa_megatron import launch
from dfa_megatron.argument_file import expand, read_arguments
from dfa_megatron.cli.main import main
from dfa_megatron.cli.memory_estimate import GIB, Model, memory, model_of
from dfa_megatron.errors import UnsupportedError

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"
FILES = sorted(CONFIGS.glob("*.args"))
TRAINING = sorted((CONFIGS / "training").glob("*.args"))
HYBRID = CONFIGS / "nemotron-h-8b.args"
BILLIONS = {"llama-7b": 6.74, "llama-3-8b": 8.03, "qwen3-8b": 8.19}
"""What the models' authors say."""


def sizes(shown: str) -> list[float]:
    """The GiB of the printed estimate, row by row."""
    table = shown[shown.index("estimate of one GPU's memory") :].split("\n\n")[0]
    return [float(line.split()[-1]) for line in table.splitlines()[1:]]


def test_the_models_and_what_trains_them_are_there() -> None:
    assert {path.stem for path in FILES} == {*BILLIONS, HYBRID.stem}
    assert {path.stem for path in TRAINING} == {"mock", "pretrain"}


def test_the_estimate_refuses_hybrid_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(HYBRID)]) == 2
    assert "--hybrid-layer-pattern in" in capsys.readouterr().err


@pytest.mark.parametrize("path", [path for path in FILES if path != HYBRID], ids=lambda path: path.stem)
def test_a_file_is_the_model_that_it_names_and_leads_to_a_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = read_arguments(path)
    model = model_of(flags, path.name)
    assert round(model.parameters / 1e9, 2) == BILLIONS[path.stem]
    assert model.seq_length % (2 * model.context_parallel_size) == 0
    for said in ("--spec dfa_megatron.megatron get_spec", "--cp-comm-type dfa", "--recompute-granularity full"):
        assert said in " ".join(flags)
    for training in TRAINING:
        names = [word for word in (*flags, *read_arguments(training)) if word.startswith("--")]
        assert len(names) == len(set(names))

    assert main(["plan", "--config", str(path), "--schedule", "balanced_shared", "--phase", "forward"]) == 0
    shown = capsys.readouterr().out
    assert f"forward, causal, {model.context_parallel_size} ranks" in shown
    assert f"{model.seq_length} tokens" in shown
    *parts, together = sizes(shown)
    assert together == pytest.approx(sum(parts), abs=0.05)
    assert together < 0.8 * 141e9 / GIB, "an H200 must have room for what the estimate leaves out"


@pytest.mark.parametrize(
    ("name", "billions"), [("GQA", 5.93), ("33H", 7.02), ("16H", 5.53)]
)  # as follows from their shapes
def test_the_papers_other_models_are_flags_after_its_first(name: str, billions: float) -> None:
    path = CONFIGS / "llama-7b.args"
    stated = re.search(rf"^#   LLaMA-{name} +(--\S.*?)(?:   |$)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert stated is not None
    model = model_of([*read_arguments(path), *stated[1].split()], path.name)
    assert round(model.parameters / 1e9, 2) == billions


def test_flags_win_over_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    path = CONFIGS / "llama-3-8b.args"
    flags = ["--ranks", "4", "--seq-length", "65536", "--schedule", "ring", "--ulysses-degree", "1"]
    assert main(["plan", "--config", str(path), *flags]) == 0
    shown = capsys.readouterr().out
    assert "ring of causal over 65536 tokens on 4 ranks" in shown
    expected = memory(model_of([*read_arguments(path), "--seq-length", "65536"], path.name), 4, messages=0)
    assert sizes(shown)[:4] == [round(size, 2) for _, size in expected[:4]]


SMALL = Model(num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=4096, ffn_hidden_size=128, vocab_size=100)


def test_the_estimate_follows_the_formats_that_it_names() -> None:
    by = {name: size * GIB for name, size in memory(SMALL, 2, messages=1000)}
    rows = 2048
    assert SMALL.vocabulary == 128
    assert SMALL.parameters == 2 * (4 * 64 * 64 + 2 * 64 * 128 + 2 * 64) + 128 * 64 + 64
    assert by["weights, gradients, optimizer"] == pytest.approx((SMALL.parameters - 64) * 18)
    kept = rows * (2 * 64 + 2 * 64 + 4 * 4)
    inside = rows * 2 * (3 * 64 + 3 * 64 + 2 * 128)
    assert by["saved of every layer"] == pytest.approx(2 * (kept + inside))
    assert by["logits and their gradient"] == pytest.approx(rows * 6 * 128)
    assert by["attention's messages"] == pytest.approx(1000)


def test_recomputation_splitting_and_pipelines_change_the_estimate() -> None:
    plain = dict(memory(SMALL, 2, 0))
    full = dict(memory(model_of(_flags("--recompute-granularity full"), "x"), 2, 0))
    assert sum(full.values()) < sum(plain.values())
    shared = dict(memory(model_of(_flags("--use-distributed-optimizer"), "x"), 2, 0))
    assert shared["weights, gradients, optimizer"] == pytest.approx(12 / 18 * plain["weights, gradients, optimizer"])
    staged = dict(memory(model_of(_flags("--pipeline-model-parallel-size 2"), "x"), 2, 0))
    assert staged["saved of every layer"] == plain["saved of every layer"], "two micro-batches of half the layers"
    assert staged["logits and their gradient"] == 0
    tiled = dict(memory(model_of(_flags("--dfa-loss-tile 256"), "x"), 2, 0))
    assert tiled["logits and their gradient"] * GIB == 256 * 6 * 128 + 128 * 64 * 4 + 2048 * 4 * 16
    deep = "--recompute-granularity full --num-layers 10"
    kept = dict(memory(model_of(_flags(deep), "x"), 2, 0))["kept of every layer: its input, out, lse"]
    offloaded = dict(memory(model_of(_flags(f"{deep} --dfa-remat-offload"), "x"), 2, 0))
    assert offloaded["kept of two layers: its input, out, lse"] == pytest.approx(kept / 5)
    whole, tiled = (
        dict(memory(model_of(_flags(f"--recompute-granularity full {more}"), "x"), 2, 0))[
            "one layer while it is recomputed"
        ]
        for more in ("", "--dfa-mlp-tile 256")
    )
    assert (whole - tiled) * GIB == pytest.approx((2048 - 256) * 2 * 2 * 128)
    assert dict(memory(model_of(_flags("--dfa-head-stages 4"), "x"), 2, GIB))["attention's messages"] == 0.25


def _flags(more: str) -> list[str]:
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 4096 --ffn-hidden-size 128"
    return f"{small} --vocab-size 100 {more}".split()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("--num-layers 2", "without --hidden-size"),
        ("--num-layers two", "invalid int value: 'two'"),
        ("num-layers 2", "a line begins with a flag"),
        ("--data-path 'a", "No closing quotation"),
        (" ".join(_flags("--num-experts 8")), "--num-experts"),
    ],
)
def test_a_bad_file_is_one_clear_line(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.args").write_text(text + "\n")
    assert main(["plan", "--config", str(tmp_path / "a.args")]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_an_argument_file_stands_for_its_flags_and_comments_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.args"
    path.write_text("# a model\n--num-layers 2  # not many\n\n--data-path 'with a space'\n--swiglu\n")
    found = expand(["--lr", "1", f"@{path}", "--num-layers", "4"])
    assert found == ["--lr", "1", "--num-layers", "2", "--data-path", "with a space", "--swiglu", "--num-layers", "4"]
    path.write_text("x")
    with pytest.raises(UnsupportedError, match=r"a\.args:1: x"):
        expand([f"@{path}"])


def test_the_launcher_says_which_argument_file_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('the script ran')")
    assert launch.main([str(tmp_path / "pretrain_gpt.py"), "@/none/such.args"]) == 2
    assert "/none/such.args" in capsys.readouterr().err
