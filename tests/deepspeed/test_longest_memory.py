"""The account of the longest sequence's memory has the bytes that were measured on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MEASURED = list(Path(__file__).parents[2].glob("benchmarks/results/*longest*.json"))


def test_the_account_is_near_every_measured_peak() -> None:
    from benchmarks.deepspeed_memory import Step
    from benchmarks.deepspeed_shapes import SHAPES

    seen = 0
    for path in MEASURED:
        file = json.loads(path.read_text())
        ranks, arguments = file["gpus"], file["arguments"]
        for one in file["results"]:
            if one["method"] == "dfa-remat" and "peak_gib" in one:
                shape = SHAPES[file["shape"]]
                step = Step(
                    shape=shape, layers=int(arguments["layers"]), vocabulary=shape.vocabulary,
                    tile=2048, ranks=ranks, offload=arguments["offload_optimizer"] == "True",
                )  # fmt: skip
                assert step.peak(one["length"] // ranks) == pytest.approx(one["peak_gib"], rel=0.002), path.name
                seen += 1
    assert seen == 5
