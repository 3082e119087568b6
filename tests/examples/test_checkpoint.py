"""Save and resume: to the bit with the same ranks, the same state on others, and what is no checkpoint is refused."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from dfa_megatron import MegatronConfig
from gpt import saved
from gpt.errors import UserError
from gpt.flags import parse_flags, settle
from gpt.index import refuse_code
from gpt.text import open_tokens
from tests.support.workers import run_ranks

TINY = ("--seq-length", "64", "--hidden-size", "32", "--num-attention-heads", "2", "--num-query-groups", "2")
STEPS = ("--train-iters", "4", "--global-batch-size", "2", "--lr-warmup-iters", "2")
LAYOUTS = {
    "context 2": (),
    "data 2, dropout": ("--context-parallel-size", "1", "--hidden-dropout", "0.1"),
    "tensor 2, dropout": ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--hidden-dropout", "0.1"),
    "pipeline 2": ("--pipeline-model-parallel-size", "2"),
}
OTHER_RANKS = "context 2"
"""The layout whose checkpoint is loaded by one context-parallel rank as well."""


@dataclass
class Outcome:
    """What one layout came to: losses of each run, and the tensors that differ between two checkpoints."""

    whole: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)
    longer: list[float] = field(default_factory=list)
    tensors: int = 0
    different: list[str] = field(default_factory=list)
    different_elsewhere: list[str] = field(default_factory=list)


def start(flags: tuple[str, ...], world_size: int) -> tuple:  # type: ignore[type-arg]
    """Arguments of `train`, with Megatron's groups made for them."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    args = parse_flags([*TINY, *STEPS, *flags])
    sizes = settle(args, world_size, cuda=False)
    tokens = open_tokens(None, vocab_size=None, seq_length=args.seq_length)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(sizes.tensor, sizes.pipeline, context_parallel_size=sizes.context)
    tensor_parallel.get_cuda_rng_tracker().reset()
    found = saved.find(args, saved.facts_of(args, sizes, tokens))
    return args, sizes, MegatronConfig(), tokens, torch.device("cpu"), found


def losses_of(flags: tuple[str, ...], world_size: int) -> list[float]:
    from gpt.loop import train

    losses: list[float] = []
    train(*start(flags, world_size), lambda step: losses.append(step["loss"]))
    return losses


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def compare(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many tensors there are, and the names of those that differ in any bit."""
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine.keys() == theirs.keys()
    return len(mine), [name for name in mine if not torch.equal(mine[name], theirs[name])]


def saved_again(flags: tuple[str, ...], world_size: int, root: Path) -> None:
    """Load a checkpoint on these ranks and save it as it is."""
    from gpt.checkpoint import load, save
    from gpt.model import build

    args, sizes, options, tokens, _, found = start(flags, world_size)
    trainer = build(args, sizes, options, tokens.vocabulary)
    load(trainer, found)
    save(trainer, str(root), found.step, {})


def all_layouts(rank: int, world_size: int, root: str) -> dict[str, Outcome]:
    """Each layout whole, cut in two, and gone on with elsewhere."""
    from dfa_megatron.megatron.cpu.stand_in import use_cpu

    use_cpu()
    outcomes = {}
    for name, flags in LAYOUTS.items():
        whole, halves, again = (Path(root) / name / kind for kind in ("whole", "halves", "again"))
        found = outcomes[name] = Outcome()
        found.whole = losses_of((*flags, "--save", str(whole)), world_size)
        found.before = losses_of((*flags, "--save", str(halves), "--exit-interval", "2"), world_size)
        if name == OTHER_RANKS:
            one = (*flags, "--context-parallel-size", "1", "--load", str(halves))
            saved_again(one, world_size, again)
            _, found.different_elsewhere = compare(halves / "iter_0000002", again / "iter_0000002")
            found.elsewhere = losses_of(one, world_size)
            found.longer = losses_of((*flags, "--load", str(halves), "--train-iters", "6"), world_size)
        found.after = losses_of((*flags, "--save", str(halves), "--load", str(halves)), world_size)
        found.tensors, found.different = compare(whole / "iter_0000004", halves / "iter_0000004")
    return outcomes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[str, Outcome]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "")
        (found, _) = run_ranks(2, all_layouts, str(root), timeout=240)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_goes_on_equals_one_that_was_never_cut_to_the_bit(outcomes: dict[str, Outcome], layout: str) -> None:
    found = outcomes[layout]
    assert len(found.whole) == 4
    assert found.before + found.after == found.whole
    assert found.tensors > 3 * 9  # of nine parameters (the layers are stacked), both moments of Adam; the generators
    assert found.different == []


def test_another_number_of_context_parallel_ranks_loads_the_same_state_and_goes_on(
    outcomes: dict[str, Outcome],
) -> None:
    found = outcomes[OTHER_RANKS]
    assert found.different_elsewhere == []
    assert len(found.elsewhere) == 2
    assert found.elsewhere == pytest.approx(found.whole[2:], rel=0, abs=1e-5)


def test_a_run_goes_on_with_more_steps_than_were_asked_for_at_first(outcomes: dict[str, Outcome]) -> None:
    found = outcomes[OTHER_RANKS]
    assert len(found.longer) == 4
    assert found.longer[0] == found.whole[2]  # one more step has passed before the other schedule shows
    assert found.longer[3] != found.longer[2]


@pytest.fixture
def checkpoints(outcomes: dict[str, Outcome], root: Path, tmp_path: Path) -> Path:
    """A copy of whole checkpoints of steps 2 and 4, of which step 2 is named as the latest."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(root / "context 2" / "halves", folder)
    (folder / saved.LATEST).write_text("2\n")
    return folder


def find(*flags: str) -> saved.Saved | None:
    args = parse_flags([*TINY, *STEPS, *flags])
    tokens = open_tokens(args.data, vocab_size=None, seq_length=args.seq_length)
    return saved.find(args, saved.facts_of(args, settle(args, 2, cuda=False), tokens))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--hidden-size", "64"), r"is of another run: --hidden-size 32, now 64; --ffn-hidden-size 128, now 256"),
        (("--lr", "1"), r"is of another run: --lr 0.003, now 1.0$"),
        (("--seed", "2"), r"is of another run: --seed 1, now 2$"),
        (("--global-batch-size", "4"), r"is of another run: --global-batch-size 2, now 4$"),
        (("--tensor-model-parallel-size", "2"), r"is of another run: --tensor-model-parallel-size 1, now 2$"),
        (("--data", __file__), r"is of another run: data of 4.* tokens \(\w+\), now of"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(checkpoints: Path, flags: tuple[str, ...], message: str) -> None:
    assert find("--load", str(checkpoints)) == saved.Saved(checkpoints / "iter_0000002", 2)
    with pytest.raises(UserError, match=message):
        find("--load", str(checkpoints), *flags)


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_do(checkpoints: Path) -> None:
    (checkpoints / saved.LATEST).write_text("4\n")
    with pytest.raises(UserError, match="is of step 4, and --train-iters is 4: nothing is left"):
        find("--load", str(checkpoints))


def test_checkpoints_are_not_written_over_by_a_run_that_starts_anew(checkpoints: Path) -> None:
    with pytest.raises(UserError, match="holds checkpoints: add --load"):
        find("--save", str(checkpoints))


def test_a_save_that_was_interrupted_is_no_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    whole = find("--load", str(checkpoints))
    (saved.begin(checkpoints, 3) / "__0_0.distcp").write_bytes(b"half")
    assert find("--load", str(checkpoints)) == whole
    saved.begin(tmp_path / "fresh", 3)
    with pytest.raises(UserError, match="holds no whole checkpoint: only one whose saving was interrupted"):
        find("--load", str(tmp_path / "fresh"))


def test_what_is_no_checkpoint_or_a_damaged_one_is_named(checkpoints: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no whole checkpoint: there is no latest_checkpointed_iteration"):
        find("--load", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="there is no such folder"):
        find("--load", str(tmp_path / "nowhere"))
    part = next(file for file in (checkpoints / "iter_0000002").glob("*.distcp") if file.stat().st_size)
    os.truncate(part, 1000)
    with pytest.raises(UserError, match=rf"is damaged: {part.name} has 1,000 bytes of"):
        find("--load", str(checkpoints))
    (checkpoints / "iter_0000002" / saved.RUN).write_text("{")
    with pytest.raises(UserError, match=r"run.json is damaged"):
        find("--load", str(checkpoints))
    (checkpoints / "iter_0000002" / saved.RUN).unlink()
    with pytest.raises(UserError, match=r"was not saved by this example, or is not whole: there is no run.json"):
        find("--load", str(checkpoints))
    (checkpoints / saved.LATEST).write_text("release")
    with pytest.raises(UserError, match="should hold the number of a step, and holds 'release'"):
        find("--load", str(checkpoints))


class _Calls:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def test_an_index_that_would_run_code_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    refuse_code(checkpoints / "iter_0000002" / ".metadata")
    for number, harmful in enumerate((pickle.dumps(_Calls()), b"ctorch.distributed.checkpoint.metadata\nos.system\n.")):
        (tmp_path / str(number)).write_bytes(harmful)
        with pytest.raises(pickle.UnpicklingError, match=r"\.metadata names .*, which no checkpoint needs"):
            refuse_code(tmp_path / str(number))


def test_a_disk_that_fills_up_while_saving_is_one_line_and_leaves_no_checkpoint(
    script: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """No file may grow beyond 64 KiB, which the log does not reach, and the weights do."""
    command = [sys.executable, str(script), *TINY, "--train-iters", "2", "--save", "new/run", "--save-report", "report"]
    command += ["--nproc-per-node", "1"]

    def run(*flags: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *flags],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
            preexec_fn=limit and (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))),
        )

    done = run(limit=1 << 16)
    assert done.stderr == "train.py: cannot save step 2 into new/run: rank 0: File too large\n"
    assert done.returncode == 2
    steps = [json.loads(line) for line in (tmp_path / "report" / "log.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if step["event"] == "step"] == [1, 2]
    done = run("--load", "new/run")
    assert done.stderr == "train.py: --load new/run holds no whole checkpoint: only one whose saving was interrupted\n"
    assert done.returncode == 2
