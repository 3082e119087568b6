"""The self-check of a DeepSpeed JSON finds what is planted and nothing else, as a command and at the start of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.cli.main import main
from dfa_megatron.deepspeed.json_block import KEY, DeepSpeedOptions
from dfa_megatron.deepspeed.selfcheck.command import case_of, make_case
from dfa_megatron.errors import SelfCheckError, UnsupportedError
from dfa_megatron.huggingface.selfcheck.command import read_config
from dfa_megatron.selfcheck import at_start
from dfa_megatron.selfcheck.compare import Comparison, Difference
from dfa_megatron.selfcheck.run_case import DIFFERS, RIGHT, Report, check_planted
from dfa_megatron.selfcheck.table import text
from dfa_megatron.testing.workers import run_ranks
from tests.deepspeed import harness
from tests.huggingface import plants
from tests.huggingface.test_selfcheck import MISTRAL, QWEN3_NEXT, written
from tests.support.models import build

JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
    KEY: {"enabled": True, "size": 2},
}


def gradients_are_not_reduced() -> None:
    """Each rank steps on its own gradients, as an engine does that takes ranks of a sequence for one."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    plants.vars_of(DeepSpeedEngine, "allreduce_gradients", wrong)


PLANTED = {
    plants.the_window_is_dropped: "three steps, output of attention: layer 0 on rank 0, token 10,",
    plants.labels_are_shifted_inside_chunks: "three steps, loss of each token: micro-batch 0 on rank 0, token 15,",
    plants.the_loss_is_scaled_by_the_ranks: "three steps, loss of each micro-batch: micro-batch 0 on rank 0",
    gradients_are_not_reduced: "three steps, gradients of parameters: lm_head.weight on rank 0",
}
"""Each fault, and what the first difference must say. tests/huggingface plants more beside the same recorder."""


def files(folder: Path, settings: dict[str, Any], model: Any = None, **block: Any) -> list[str]:
    """The words for a JSON and the model, Mistral by default."""
    path = folder / "ds.json"
    path.write_text(json.dumps({**settings, KEY: settings[KEY] | block}), encoding="utf-8")
    return [str(path), "--model", written(folder, model or MISTRAL)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """One with nothing planted, and one for each fault; the reference runs once."""
    model = read_config(Path(written(tmp_path_factory.mktemp("engine"), MISTRAL)))
    case = make_case(JSON, DeepSpeedOptions.from_mapping(JSON[KEY]), model, 2, 1)
    names = ["nothing", *(fault.__name__ for fault in PLANTED)]
    found = check_planted(case, [(), *([fault] for fault in PLANTED)])
    return dict(zip(names, found, strict=True))


def test_where_nothing_is_wrong_all_rows_are_equal(reports: dict[str, Report]) -> None:
    report = reports["nothing"]
    assert report.status == RIGHT, text(report)
    compared = {(row.section, row.kind) for row in report.comparison.rows}
    for section in ("three steps", "rematerialized"):
        for kind in ("q, k, v", "gradients of q, k, v", "logits", "loss", "gradients of parameters"):
            assert (section, kind) in compared
        assert {(section, "change of parameters"), (section, "evaluation: logits")} <= compared


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_where_it_is(fault: Any, reports: dict[str, Report]) -> None:
    report = reports[fault.__name__]
    assert report.status == DIFFERS
    assert PLANTED[fault] in text(report).partition("first difference: ")[2], text(report)


def test_a_hybrid_at_zero_3_with_accumulation_and_two_sequences_at_a_time_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    settings = JSON | {"zero_optimization": zero, "gradient_accumulation_steps": 4}
    assert (
        main(["selfcheck", "deepspeed", *files(tmp_path, settings, QWEN3_NEXT, checkpoint="remat", loss_tile=5)]) == 0
    )
    said = capsys.readouterr().out
    assert "ZeRO 3, size 2, 2 sequences at a time" in said
    for reduced in ("zero_optimization.offload_optimizer", "gradient_accumulation_steps", "bf16"):
        assert f"\n{reduced} " in said
    assert "norm of the gradient" in said
    assert "output of states" in said


def test_what_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    unsized = {**JSON, KEY: {"enabled": True}}
    for settings, words, wanted in (
        ({**JSON, KEY: {"enabled": False}}, [], "no enabled block"),
        (unsized, [], "the number of ranks that share a sequence is unknown"),
        (JSON, ["--ranks", "3"], r"--ranks=3 beside dist_flash_attention\.size=2"),
        (JSON | {"optimizer": {"type": "OneBitAdam"}}, [], "optimizer.type"),
        (JSON | {"gradient_allreduce_op": "sum"}, [], "gradient_allreduce_op"),
    ):
        with pytest.raises(UnsupportedError, match=wanted):
            case_of([*files(tmp_path, settings), *words])
    assert case_of([*files(tmp_path, unsized), "--ranks", "3"]).ranks == 6
    with pytest.raises(UnsupportedError, match="it is no JSON"):
        case_of([__file__, "--model", "config.json"])


def start_runs(rank: int, world_size: int) -> list[str]:
    """What a rank is told: of a right configuration, and of a fault that is planted."""
    harness.prepare_worker(rank)
    asked = harness.settings(1, 2, selfcheck=True)

    def start() -> Any:
        model = build("Llama", sliding_window=None)
        return dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=asked)[0]

    plain = harness.settings(1, 2)
    model = build("Llama", sliding_window=None)
    dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=plain)[0].destroy()
    unasked = torch.random.get_rng_state()
    ran = []
    real = at_start.check  # type: ignore[attr-defined]
    at_start.check = lambda case: ran.append(real(case)) or ran[-1]  # type: ignore[attr-defined]
    for _ in range(2):
        engine = start()
        assert torch.equal(torch.random.get_rng_state(), unasked), "the check has drawn random numbers"
        engine.destroy()
    assert len(ran) == (rank == 0), "it runs once, on the first rank"
    asked["gradient_clipping"] = 0.5
    found = Comparison(differences=[Difference("three steps", "loss", "planted")])
    at_start.check = lambda case: Report(case, found)  # type: ignore[attr-defined]
    with pytest.raises(SelfCheckError) as differs:
        start()
    return [str(differs.value)]


def test_the_blocks_key_checks_once_at_start_and_tells_every_rank() -> None:
    first, second = run_ranks(2, start_runs, timeout=150)
    assert first == second
    assert "first difference: three steps, loss: planted" in first[0]
