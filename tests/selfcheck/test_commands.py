"""`dfa-megatron selfcheck` on a user's flags: what it reduces and keeps, what it refuses, and its exit status."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from dfa_megatron.argument_file import read_arguments
from dfa_megatron.cli.main import main
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.selfcheck.read_flags import read
from dfa_megatron.megatron.selfcheck.shrink import case_of
from tests.selfcheck.test_megatron import FLAGS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs" / "megatron").glob("*.args"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_keeps_what_attention_depends_on(path: Path) -> None:
    words = read_arguments(path)
    asked = {name.lstrip("-"): value for name, value in pairwise(words) if name.startswith("--")}
    case = case_of(words)
    config = case.settings["config"]
    heads, groups = int(asked["num-attention-heads"]), int(asked.get("num-query-groups", asked["num-attention-heads"]))
    kept = config.get("num_query_groups") or config["num_attention_heads"]
    assert config["num_attention_heads"] / kept == heads / groups
    assert case.settings["parallel"]["cp"] == int(asked["context-parallel-size"])
    assert case.ranks <= max(16, case.settings["parallel"]["cp"])
    assert config["hidden_size"] <= 64
    assert case.settings["training"]["tokens"] % (2 * case.settings["parallel"]["cp"]) == 0
    assert {"layers", "tokens", "vocabulary", "hidden_size"} <= {reduction.what for reduction in case.reduced}
    assert not [line for line in case.unseen if line.startswith("flags")], "a flag of a shipped file is not known"


SAID = {
    "bf16": "dtype", "fp16": "dtype", "num_attention_heads": "heads and key/value heads", "num_layers": "layers",
    "num_moe_experts": "experts", "num_query_groups": "heads and key/value heads", "transformer_impl": "modules",
    "window_size": "window",
}  # fmt: skip
"""What the table calls a field of the config."""


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("--fp8-format hybrid --num-experts 4 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion", ["fp8"]),
        ("--fp4-format e2m1 --tp-comm-overlap --cross-entropy-loss-fusion", ["fp4", "fused kernels"]),
        ("--cpu-offloading --te-rng-tracker --memory-efficient-layer-norm", ["cpu_offloading", "use_te_rng_tracker"]),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1 --hidden-dropout 0.1", ["hidden_dropout"]),
        ("--mtp-num-layers 1 --num-layers 64 --hidden-size 4096 --num-attention-heads 64 --bf16", ["dtype"]),
        ("--fp16 --micro-batch-size 4 --global-batch-size 64", ["gradient reduction", "samples in a micro-batch"]),
        ("--bf16 --grad-reduce-in-bf16 --lr 1e-4 --lr-decay-style cosine", ["gradient reduction", "learning rate"]),
        ("--adam-eps 1e-5 --ddp-bucket-size 40000000", ["adam_eps", "gradient buckets", "micro-batches in a step"]),
        ("--tensor-model-parallel-size 4 --sequence-parallel", ["--tensor-model-parallel-size", "data-parallel size"]),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4 --num-layers 16", ["vocabulary"]),
    ],
)
def test_whatever_runs_otherwise_than_it_was_asked_for_has_its_line(more: str, lines: list[str]) -> None:
    words = [*FLAGS.split(), *more.split()]
    asked, case = read(words), case_of(words)
    said = {reduction.what for reduction in case.reduced}
    runs = case.settings["config"] | case.settings["recompute"]
    changed = {
        name for name, value in asked.config.items() if runs.get(name, False) != value and "parallel" not in name
    }
    assert {SAID.get(name, name) for name in changed} <= said
    assert {*lines, "learning rate", "adam_eps", "gradient buckets", "micro-batches in a step"} <= said
    training = case.settings["training"]
    for name in set(training) & set(asked.training) - {"lr"}:
        if training[name] != asked.training[name]:
            assert {"micro_batch_size": "samples in a micro-batch"}.get(name, name) in said


def test_fused_kernels_that_a_script_switches_off_are_not_listed() -> None:
    off = "--no-rope-fusion --no-bias-swiglu-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion"
    fused = {r.what: r.asked for r in case_of([*FLAGS.split(), *off.split()]).reduced}
    assert fused["fused kernels"] == "gradient accumulation"


def test_a_flag_that_only_begins_like_a_known_one_is_named() -> None:
    invented = "--save-the-activations --lr-of-heads 3 --load-balance --no-bias-anywhere --data-mask x --split-heads"
    unseen = case_of([*FLAGS.split(), *invented.split()]).unseen
    named = next(line for line in unseen if line.startswith("flags without a part"))
    assert named.split(": ")[1].split() == [word for word in invented.split() if word.startswith("--")]
    with pytest.raises(UnsupportedError, match=r"--dfa-shedule is not supported.*perhaps '--dfa-schedule'"):
        case_of([*FLAGS.split(), "--dfa-shedule", "ring"])


def test_what_decides_the_plan_shrinks_in_proportion() -> None:
    flags = "--seq-length 65536 --window-size 4096,0 --num-layers 48 --window-attn-skip-freq ([1]*3+[0])*12"
    case = case_of([*FLAGS.split(), *flags.split()])
    config, training = case.settings["config"], case.settings["training"]
    assert config["window_size"][0] / training["tokens"] == 4096 / 65536
    assert config["window_attn_skip_freq"] == [1, 1, 1, 0]
    assert config["num_layers"] == 4
    # A length that does not divide among the ranks stays one that does not.
    odd = case_of([*FLAGS.split(), "--seq-length", "65537"])
    assert odd.settings["training"]["tokens"] % 4 == 65537 % 4


def test_other_parallel_sizes_are_at_most_two_and_context_parallelism_is_kept() -> None:
    more = "--context-parallel-size 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
    case = case_of([*FLAGS.split(), *more.split()])
    assert case.settings["parallel"] == {"cp": 8, "tp": 2, "pp": 1, "vp": None}
    assert "--pipeline-model-parallel-size" in {reduction.what for reduction in case.reduced}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--context-parallel-size", "64"], "at most 32 processes"),
        (["--optimizer", "muon"], "--optimizer muon"),
        (["--spec", "my.module", "my_spec"], "--spec my.module in a self-check is not supported"),
        (["--attention-dropout", "0.1"], "attention_dropout"),
        (["--window-attn-skip-freq", "__import__('os')"], "no pattern of layers"),
        (["--attention-backend", "local"], "--attention-backend local"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_status_2(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["selfcheck", "megatron", *FLAGS.split(), *change]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_flags_without_a_spec_would_not_be_distributed() -> None:
    words = FLAGS.split()
    for flag, values in (("--spec", 2), ("--cp-comm-type", 1)):
        place = words.index(flag)
        del words[place : place + 1 + values]
    with pytest.raises(UnsupportedError, match="Megatron would build its own attention"):
        case_of(words)


COMPOSED = {
    "pipeline, interleaved": "--pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "tensor parallel, gated, contiguous": "--tensor-model-parallel-size 2 --sequence-parallel --swiglu "
    "--dfa-data-layout contiguous --dfa-loss-tile 7 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather",
    "experts, zigzag, recomputed": "--num-experts 4 --moe-ffn-hidden-size 32 --dfa-data-layout zigzag "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --calculate-per-token-loss",
}


@pytest.mark.parametrize("more", COMPOSED.values(), ids=COMPOSED)
def test_compositions_are_checked(more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.args"
    path.write_text(" ".join(FLAGS.split()).replace(" --", "\n--"), encoding="utf-8")
    assert main(["selfcheck", "megatron", str(path), *more.split()]) == 0
    assert "ranks compute what one rank computes" in capsys.readouterr().out
