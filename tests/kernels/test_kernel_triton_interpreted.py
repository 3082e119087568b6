"""The Triton kernels without a GPU: some tests of plans, kernels, merges and indexers, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dfa_megatron.kernels.triton.support import interpreted
from tests.fuzz import attempt
from tests.fuzz.random_case import draw

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TESTS = Path(__file__).parents[1]

CHOSEN = {
    "kernels/test_kernel_conformance.py": {
        "float32 and says": [
            "130x33", "1x5", "7x1", "129x129", "48x48-band0", "32x80-band20", "80x8-band12", "d17",
            "d33", "d24v40", "24x24-band-1 and 6:1",
        ],
        "bfloat16 and says": ["40x72", "1x24"],
        "strided": ["misaligned and 40x56", "last and 40x40 and 2:2"],
        "nothing and float32": ["70x30-band2"],
        "longer and float32": ["see"],
        "logits and float32": ["64x64-band9"],
        "inputs_are_left": [],
        "float32 and capped": ["0.7 and window"],
    },
    "kernels/test_kernel_bits.py": {"company and causal and 8-2-64": []},
    "kernels/test_kernel_segments.py": {
        "float32 and several": ["kinds", "windows and sides"],
    },
    "kernels/test_kernel_merge.py": {
        "several or minus_delta or memory_order or saw_nothing or filled": [],
        "fused_merge": ["None", "into_dtype2"],
        "round_once": ["dtypes0", "dtypes14", "dtypes26"],
    },
    "kernels/test_kernel_triton_interpreted.py": {"may_stay": []},
    "indexed/test_sparse_kernels.py": {"and_their or choose": []},
    "runtime/execute/test_together.py": {
        "odd": ["zigzag and sides"],
        "packs": ["load_balanced and left"],
    },
}  # fmt: skip
"""By file: what a test's name holds, and one of which words beside it."""


def expression(file: str) -> str:
    """In the syntax of pytest -k."""
    terms = ((words, " or ".join(f"({one})" for one in ones)) for words, ones in CHOSEN[file].items() if words)
    chosen = " or ".join(f"({words} and ({ones}))" if ones else f"({words})" for words, ones in terms)
    return f"({Path(file).name} and ({chosen}))"


@pytest.mark.support("kernels", "a part of these in Triton's interpreter", "`triton`")
@pytest.mark.timeout(420)
def test_the_triton_kernels_pass_in_the_interpreter() -> None:
    """With DFA_HALF=0 or 1 every second one (tests/kernels/conftest.py)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / file) for file in CHOSEN)]
    run = subprocess.run(
        [*command, "-k", " or ".join(map(expression, CHOSEN))],
        cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) >= (29 if os.environ.get("DFA_HALF") else 59), run.stdout


@pytest.mark.skipif(not interpreted(), reason="the run above has it")
def test_a_table_of_segments_may_stay_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge packs of a few tokens each as the random cases are judged on a GPU, and one that leaves its output."""
    from dfa_megatron.kernels.triton.adapter import TritonKernel

    monkeypatch.setattr(TritonKernel, "replays", lambda self, **_: False)  # no tape sees the interpreter
    case, dice, kept, call = draw(20261128, 121, "together", "cuda", [1]), random.Random(1), [], attempt._call
    sizes = {"device": "cpu", "dtype": torch.float32, "heads": 1, "kv_heads": 1, "head_dim": 16, "head_dim_v": 16}
    for left in ("", "output"):
        length = dice.randint(3, 4)
        cuts = sorted(dice.sample(range(1, length), length - 1 - dice.choice([0, 1])))
        whole = replace(case.whole, offsets=(0, *cuts, length), tokens=length, **sizes)
        options = case.options | {"layout": "contiguous", "kernel": "triton"}
        one = replace(case, whole=whole, options=options, checkpoint="none")
        if left:
            monkeypatch.setattr(attempt, "_call", lambda *args: kept.append(found := call(*args)) or found)
        outcome = attempt.attempt(one)
        assert outcome.kind == ("wrong" if left else "right"), outcome
        assert outcome.reason.startswith("in units of the tolerance: what stays" if left else "")
