"""`dfa-megatron prove megatron` proves a script's flags with a small model, read by Megatron's own parser."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest

from dfa_megatron.cli.main import main
from dfa_megatron.errors import ProofError, UnsupportedError
from dfa_megatron.megatron.small_script import small_job
from tests.megatron.test_prove import lost_window
from tests.support.plants import states_dropped
from tests.support.workers import run_ranks

FLAGS = """
--num-layers 12 --hidden-size 512 --num-attention-heads 16 --group-query-attention --num-query-groups 8
--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --bf16
--attention-dropout 0.0 --hidden-dropout 0.1 --position-embedding-type rope --normalization RMSNorm
--disable-bias-linear --vocab-size 4096 --no-create-attention-mask-in-dataloader --cp-comm-type dfa
--spec dfa_megatron.megatron get_spec
"""
CASES = (
    "--context-parallel-size 2 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --sequence-parallel "
    "--swiglu --window-size 400,0 --window-attn-skip-freq 3 --global-batch-size 64",
    "--context-parallel-size 8 --num-experts 64 --expert-model-parallel-size 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-token-dispatcher-type alltoall",
)
HYBRID = "--hybrid-layer-pattern M*-M*-M*- --context-parallel-size 2"


def small(more: str) -> Any:
    words = f"{FLAGS} {more}"
    if "hybrid" in more:
        words = words.replace("--num-layers 12", "").replace("get_spec", "hybrid_stack_spec")
    return small_job(words.split())


def proved(rank: int, world_size: int) -> list[str]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), CUDA_DEVICE_MAX_CONNECTIONS="1")
    job = small(HYBRID)
    assert job.ranks == world_size
    said = [str(job.prove())]
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    with (
        states_dropped(),
        pytest.raises(ProofError, match=r"first difference: .*output of layers: decoder.layers.0.mixer"),
    ):
        small(HYBRID).prove()
    parallel_state.destroy_model_parallel()
    with pytest.raises(UnsupportedError, match=r"Megatron says: num_"):
        small(
            "--tensor-model-parallel-size 2 --context-parallel-size 1 --num-attention-heads 16 --num-query-groups 3"
        ).prove()
    job = small("--context-parallel-size 2 --window-size 400,0 --mtp-num-layers 1")
    with patch("dfa_megatron.megatron.small_script.prove", _with_a_lost_window):
        said.append(str(job.prove()))
    return said


def _with_a_lost_window(models: Any) -> str:
    from dfa_megatron.megatron import prove

    with lost_window(models), pytest.raises(ProofError) as caught:
        prove(models)
    return str(caught.value)


def test_flags_are_proved_with_a_small_model_and_a_fault_is_found() -> None:
    pytest.importorskip("megatron.training.argument_utils", reason="megatron-core has it from 0.19 on")
    for hybrid, lost in run_ranks(2, proved, timeout=120):
        assert "HybridModel in float32, cp 2" in hybrid
        assert "2 ranks compute what one rank computes" in hybrid
        assert "first difference: a sequence, 96 tokens, output of layers: decoder.layers.0.self_attention" in lost


def test_sizes_shrink_and_what_attention_depends_on_stays() -> None:
    pytest.importorskip("megatron.training.argument_utils", reason="megatron-core has it from 0.19 on")
    wide, experts = (str(small(more)).splitlines() for more in CASES)
    said = [" ".join(line.split()) for line in (*wide, *experts)]
    for line in (
        "--bf16 on off",
        "--num-attention-heads 16 4",
        "--num-query-groups 8 2",
        "--tensor-model-parallel-size 4 2",
        "--window-size (400, 0) (9, 0)",
        "--num-layers 12 4",
        "--num-experts 64 8",
    ):
        assert line in said, line
    assert not [line for line in said if "dropout" in line or "expert-model" in line or "context" in line]
    assert [small(more).ranks for more in CASES] == [8, 8]


def test_a_megatron_without_its_parser_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.dict("sys.modules", {"megatron.training.argument_utils": None}):
        assert main(["prove", "megatron", *FLAGS.split()]) == 2
    assert "megatron-core" in capsys.readouterr().err
