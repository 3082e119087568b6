"""Every example: the losses and gradient norms of several ranks are those of one.

A process of its own runs some on one rank, one of each framework, so that nothing is imported for them. Other ranks are
workers, which have imported their packages before: that takes seconds for each. torchrun starts two of the main job.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import ENVIRONMENT, of_one_rank, said_over_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

FILES = {
    # Packages, ranks, flags.
    "own_model.py": (("torch",), 3, ("--seq-length", "96")),
    "megatron_loop.py": (("megatron.core",), 2, ("--seq-length", "96")),
    "deepspeed_transformers.py": (("deepspeed", "transformers"), 2, ("--seq-length", "96")),
    "deepspeed_pipeline.py": (("deepspeed",), 4, ("--seq-length", "96")),
    "trainer_packed.py": (("transformers", "accelerate"), 2, ("--seq-length", "96")),
    "accelerate_fsdp2.py": (("transformers", "accelerate"), 3, ("--seq-length", "96")),
    "fsdp2.py": (("transformers",), 4, ("--seq-length", "96")),
    "trl_sft.py": (("trl",), 2, ()),
}
ALONE = {"deepspeed_pipeline.py": ("--stages", "1"), "fsdp2.py": ("--context-parallel-size", "1", "--accumulate", "4")}
"""Flags of one rank beside the others."""

BY_ITSELF = ("own_model.py", "deepspeed_pipeline.py", "trainer_packed.py")
"""What a process of its own runs on one rank; of Megatron the main job is one."""

SOMEWHERE_ELSE = {"train.py", "plan_by_hand.py", "grpo_tree.py", "automodel_cp.py"}


def run(folder: Path, *command: str, **more: str) -> str:
    """What a command of Python prints."""
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command], cwd=folder,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, **more}, capture_output=True, text=True, timeout=170,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def said_alone(folder: Path, name: str, *flags: str) -> str:
    """What an example prints on one rank."""
    if name in BY_ITSELF:
        return run(folder, str(EXAMPLES / name), *flags, **of_one_rank())
    return said_over_ranks(1, folder, str(EXAMPLES / name), *flags)


def losses_and_norms(said: str) -> list[float]:
    assert "built successfully" not in said, "DeepSpeed compiles nothing"
    return [float(each) for each in re.findall(r"(?:(?<!train_)loss|grad_norm)'?:? '?(\d[\d.]*)", said)]


@pytest.mark.parametrize("name", FILES)
def test_an_example_runs_alone_and_trains_as_on_one_rank(name: str, tmp_path: Path) -> None:
    packages, ranks, flags = FILES[name]
    for package in packages:
        parent = package.split(".")[0]
        if importlib.util.find_spec(parent) is None or importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    said = said_over_ranks(ranks, tmp_path, str(EXAMPLES / name), "--steps", "3", *flags)
    assert re.search(r"dfa: \d ranks, contiguous, ", said), said
    assert ("'dfa/forwards': 2" in said) == (name in ("trainer_packed.py", "trl_sft.py")), "Trainer logs stats()"
    found = losses_and_norms(said)
    assert len(found) == 6
    alone = losses_and_norms(said_alone(tmp_path, name, "--steps", "3", *flags, *ALONE.get(name, ())))
    assert found == pytest.approx(alone, rel=2e-3 if name == "fsdp2.py" else 3e-4)  # that one in bfloat16
    assert found[-2] < found[0]


def test_rollouts_of_two_ranks_and_their_losses_are_those_of_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = ("--steps", "3", "--spelling-steps", "3", "--answers", "4", "--pack-length", "150")
    over_two = said_over_ranks(2, tmp_path, str(EXAMPLES / "grpo_tree.py"), *flags)
    said = said_alone(tmp_path, "grpo_tree.py", *flags), over_two
    one, two = (re.findall(r"reward (\d\.\d+)  loss (-?\d\.\d+)  (\d+) of 896 tokens", text) for text in said)
    assert [*map(len, (one, two))] == [3, 3]
    for own, others in zip(one, two, strict=True):
        assert [*map(float, own[:2])] == pytest.approx([*map(float, others[:2])], rel=1e-3, abs=2e-6)
        assert int(own[2]) < 700
        assert int(own[2]) <= int(others[2]) <= int(own[2]) + 8


def test_torchrun_ends_with_the_text_of_an_error(tmp_path: Path) -> None:
    flags = ("--standalone", "--nproc-per-node", "2", str(EXAMPLES / "own_model.py"), "--seq-length", "64")
    with pytest.raises(AssertionError, match=r"Not supported: q \(1, 32, 1, 0\).* What works: .*\n\s+=+\n"):
        run(tmp_path, "-m", "torch.distributed.run", *flags, "--hidden", "0")


def test_every_example_is_run_and_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == FILES.keys() | SOMEWHERE_ELSE | {"step_log.py"}
    assert [name for name in FILES if len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) > 88] == []


def test_the_notebook_runs_and_compares_itself_with_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "naive.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)  # noqa: S102 a notebook of ours
    assert capsys.readouterr().out.count("largest difference") == 4


def test_the_main_job_trains_by_itself_and_with_tensor_parallelism_and_leaves_its_report(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    flags = ("--seq-length", "256", "--train-iters", "12", "--log-interval", "4", "--hidden-size", "64")
    flags = (*flags, "--save-report", "report")
    both = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    for over in (run, functools.partial(said_over_ranks, 4)):
        said = over(tmp_path, str(EXAMPLES / "train.py"), *flags, *(both if over is not run else ()))
        assert "attention ran 24 times for 24 layers x micro-batches of rank 0: 1.00 each" in said
        assert len(re.findall(r"^step +\d+  loss", said, re.MULTILINE)) == 4
        found = [json.loads(line)["loss"] for line in (tmp_path / "report/log.jsonl").read_text().splitlines()]
        assert len(found) == 12
        assert found[-1] < found[0] - 0.5
        assert (tmp_path / "report/summary.txt").read_text() in said
        (tmp_path / "report/loss.png").rename(tmp_path / "loss.png")
        assert (tmp_path / "loss.png").stat().st_size > 5000
