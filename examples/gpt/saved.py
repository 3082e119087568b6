"""Find a folder's checkpoint, and check before any rank starts that this run may continue from it.

A folder of checkpoints looks like Megatron's: `iter_0000010`, and `latest_checkpointed_iteration.txt` names the last.
`run.json` in each describes the run. A checkpoint is written under another name and renamed when it is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import UserError, user_error_if_impossible
from gpt.flags import Sizes
from gpt.text import Tokens

LATEST, RUN, UNFINISHED = "latest_checkpointed_iteration.txt", "run.json", ".part"

Facts = dict[str, Any]
"""The settings that must be the same in a continued run, by the names that its user knows.

`--train-iters` may change: the learning rate then goes on along the new schedule.
"""

_SAME_FLAGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "rotary_base", "hidden_dropout"),
    *("lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "seed"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)


@dataclass(frozen=True, slots=True)
class Saved:
    """Name a complete checkpoint that this run may continue from."""

    folder: Path
    step: int


def facts_of(args: argparse.Namespace, sizes: Sizes, tokens: Tokens) -> Facts:
    """Return the facts that a checkpoint stores of its run, without the context- and data-parallel sizes."""
    length = args.seq_length + 1
    ends = hashlib.sha256(tokens.window(0, length).numpy().tobytes())
    ends.update(tokens.window(len(tokens) - length, length).numpy().tobytes())
    return {
        **{f"--{name.replace('_', '-')}": getattr(args, name) for name in _SAME_FLAGS},
        "--ffn-hidden-size": args.ffn_hidden_size or 4 * args.hidden_size,
        "--num-query-groups": args.num_query_groups or args.num_attention_heads,
        "--global-batch-size": args.micro_batch_size * sizes.micro_batches * sizes.data,
        "--bf16": sizes.bf16,
        "vocabulary": tokens.vocabulary,
        "data": f"of {len(tokens):,} tokens ({ends.hexdigest()[:12]})",
    }


def find(args: argparse.Namespace, facts: Facts) -> Saved | None:
    """Return the checkpoint to continue from; None without `--load`.

    Raises:
        UserError: `--load` holds no whole checkpoint of this run; `--save` holds checkpoints of another.
    """
    goes_on = args.save and args.load and Path(args.load).resolve() == Path(args.save).resolve()
    if args.save and not goes_on and (Path(args.save) / LATEST).exists():
        raise UserError(f"--save {args.save} holds checkpoints: add --load {args.save}, or name another folder")
    if not args.load:
        return None
    with user_error_if_impossible(f"read --load {args.load}"):
        folder = _latest(Path(args.load))
        saved, theirs = _read(folder)
    names = [name for name in {**facts, **theirs} if facts.get(name) != theirs.get(name)]
    if names:
        differences = "; ".join(f"{name} {theirs.get(name)}, now {facts.get(name)}" for name in names)
        raise UserError(f"{folder} is of another run: {differences}")
    if saved.step >= args.train_iters:
        raise UserError(f"{folder} is of step {saved.step}, and --train-iters is {args.train_iters}: nothing is left")
    return saved


def _latest(root: Path) -> Path:
    """Return the folder of the last complete checkpoint."""
    if not root.is_dir():
        raise UserError(f"--load {root}: there is no such folder")
    if not (root / LATEST).exists():
        unfinished = any(root.glob(f"iter_*{UNFINISHED}"))
        why = "only one whose saving was interrupted" if unfinished else f"there is no {LATEST}"
        raise UserError(f"--load {root} holds no whole checkpoint: {why}")
    named = (root / LATEST).read_text(encoding="utf-8").strip()
    if not named.isdecimal():
        raise UserError(f"{root / LATEST} should hold the number of a step, and holds {named[:20]!r}")
    return _folder(root, int(named))


def _read(folder: Path) -> tuple[Saved, Facts]:
    """Read `run.json`; every file in it must exist with its full size."""
    path = folder / RUN
    if not path.exists():
        raise UserError(f"{folder} was not saved by this example, or is not whole: there is no {RUN}")
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        saved, facts, files = Saved(folder, int(run["step"])), dict(run["facts"]), dict(run["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error!r}") from error
    for name, size in files.items():
        file = folder / name
        there = file.stat().st_size if file.exists() else 0
        if there != size:
            raise UserError(f"{folder} is damaged: {name} has {there:,} bytes of {size:,}")
    return saved, facts


def begin(root: Path, step: int) -> Path:
    """Make an empty folder to write a checkpoint into; one rank calls this."""
    folder = unfinished(root, step)
    if folder.exists():  # a save that was interrupted
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def finish(root: Path, step: int, facts: Facts) -> None:
    """Make the written folder the latest checkpoint; one rank calls this when all have written."""
    written, whole = unfinished(root, step), _folder(root, step)
    files = {file.name: file.stat().st_size for file in sorted(written.iterdir())}
    _write(written / RUN, json.dumps({"step": step, "facts": facts, "files": files}, indent=1))
    if whole.exists():  # of a run that ended before it could name it
        shutil.rmtree(whole)
    written.rename(whole)
    _write(root / (LATEST + UNFINISHED), f"{step}\n")
    (root / (LATEST + UNFINISHED)).rename(root / LATEST)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _folder(root: Path, step: int) -> Path:
    return root / f"iter_{step:07d}"


def unfinished(root: Path, step: int) -> Path:
    """Return the folder of a checkpoint that is not complete yet."""
    return root / f"iter_{step:07d}{UNFINISHED}"
