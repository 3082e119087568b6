"""Compare one model type on this rank and its peers with the same model on one process, and judge."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.call_checks import computes_loss
from dfa_megatron.huggingface.padding import IGNORED
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.sweep import images
from tests.huggingface.sweep.tiny import build
from tests.support.recurrences import by_path

TOLERANCE = 1e-7
"""Of the largest entry; the labels' number is divided among ranks in float32."""
ROWS = 20
"""Tokens of a rank; the last one holds one less."""
SWEPT = ("plain", "packed", "remat")
"""The sections that the command runs."""
DOCUMENTS = (0, 1, 9, 23)
"""Where packed documents begin: one of a single token, one that reaches over two ranks."""
TREE = (0, 9, 10, 12, 26, 27, 33), (-1, 0, 1, 2, 1, 0, -1)
"""Where segments of a tree begin, and their parents; a single token and its parent and child are on three of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold what became of a type: "exact", "refused", "wrong", "crash" or "not run".

    section: one of SECTIONS. reason: of a refusal, or what is wrong. worst: the largest difference.
    """

    kind: str
    state: str
    section: str
    reason: str = ""
    worst: float = 0.0

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


class WrongError(Exception):
    """A number differs from one process's."""


def attempt(kind: str, sections: tuple[str, ...] = SWEPT) -> list[Verdict]:
    """Return a verdict of each section; the ranks of the default group call this together."""
    found = []
    for section in sections:
        try:
            worst = SECTIONS[section](kind)
            if worst > TOLERANCE:
                raise WrongError(f"{_FAR[worst]}: {worst:.1e}")
            found.append(Verdict(kind, "exact", section, worst=worst))
        except UnsupportedError as error:
            found.append(Verdict(kind, "refused", section, str(error)))
        except WrongError as error:
            found.append(Verdict(kind, "wrong", section, str(error)))
        except Exception:  # noqa: BLE001 (whatever it is, it is the verdict)
            found.append(Verdict(kind, "crash", section, traceback.format_exc()))
        if found[-1].state != "exact" and section == "plain":
            break
    return found


def _plain(kind: str) -> float:
    with Float64():
        return _compare(kind, _whole)


def _packed(kind: str) -> float:
    with Float64():
        return _compare(kind, _one_by_one, DOCUMENTS)


def _tree(kind: str) -> float:
    with Float64():
        return _compare(kind, _path_by_path, *TREE)


def _remat(kind: str) -> float:
    """Compare with the distributed model that keeps everything, because a recompute takes no function mode."""
    reference = dfa_hf.distribute_attention(build(kind), unlisted=True)
    model = dfa_hf.distribute_attention(build(kind), config=TrainingConfig(checkpoint="remat"), unlisted=True)
    batch = _batch(reference, kind, DOCUMENTS)
    labels = batch.pop("labels")
    for each in (reference, model):
        dfa_hf.causal_lm_loss(each(**batch).logits, labels).backward()
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    return max(_far(name, _gradient(mine), _gradient(theirs)) for (name, mine), (_, theirs) in pairs)


SECTIONS: dict[str, Callable[[str], float]] = {"plain": _plain, "packed": _packed, "tree": _tree, "remat": _remat}


class Float64(TorchFunctionMode):
    """Compute in float64 what models ask for in float32: norms, softmax, rotary embeddings, states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.full:  # of a least number, which float32 does not have
            kwargs = {"dtype": torch.float64} | (kwargs or {})
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _compare(
    kind: str, run: Callable[[Any, Any], Any], starts: Sequence[int] = (), parents: Sequence[int] = ()
) -> float:
    """Return the largest difference of logits, loss and gradients."""
    size = dist.get_world_size()
    reference = build(kind)
    batch = _batch(reference, kind, starts, parents)
    shapes = {name: x.shape for name, x in reference.state_dict().items()}
    model = dfa_hf.distribute_attention(copy.deepcopy(reference), unlisted=True)
    logits = run(reference, batch)
    loss = _mean(logits, batch["labels"])
    loss.backward()
    labels = batch["labels"]
    if not computes_loss(model):
        del batch["labels"]
    got = model(**batch)
    own = got.loss if computes_loss(model) else dfa_hf.causal_lm_loss(got.logits, labels)
    own.backward()
    if {name: x.shape for name, x in model.state_dict().items()} != shapes:
        raise WrongError("a checkpoint of it is not one of the model on one process")
    worst = _far("logits", got.logits, shard_sequence(logits))
    worst = max(worst, _far("loss", own.detach(), loss))
    theirs = {name: _gradient(parameter) for name, parameter in reference.named_parameters()}
    least = 1e-2 * max(float(g.abs().max()) for g in theirs.values())
    for name, parameter in model.named_parameters():
        gradient = _gradient(parameter)
        dist.all_reduce(gradient)
        worst = max(worst, _far(name, gradient / size, theirs[name], least))
    return worst


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


_FAR: dict[float, str] = {}


def _far(name: str, got: torch.Tensor, want: torch.Tensor, least: float = 0.0) -> float:
    distance = (got.detach().double() - want.detach().double()).abs().max() / max(float(want.abs().max()), least, 1e-30)
    both = torch.tensor([float(distance) if torch.isfinite(distance) else 1e9])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    _FAR[float(both)] = name
    return float(both)


def _whole(reference: Any, batch: Any) -> torch.Tensor:
    given = {name: x for name, x in batch.items() if name not in ("labels", "position_ids", "prompt_tree")}
    logits: torch.Tensor = reference(**given, use_cache=False).logits
    return logits


def _one_by_one(reference: Any, batch: Any) -> torch.Tensor:
    """Return the logits of packed documents, each in a call of its own."""
    starts = [*DOCUMENTS, batch["input_ids"].shape[1]]
    return torch.cat([_whole(reference, images.part(batch, lo, hi)) for lo, hi in pairwise(starts)], 1)


def _path_by_path(reference: Any, batch: Any) -> torch.Tensor:
    """Return the logits of every segment, each in a call of its own behind its path."""
    offsets = (*TREE[0], batch["input_ids"].shape[1])
    return by_path(lambda path: _whole(reference, path), {"input_ids": batch["input_ids"]}, offsets, TREE[1])


def _mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    following = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=IGNORED)


def _batch(reference: Any, kind: str, starts: Sequence[int], parents: Sequence[int] = ()) -> dict[str, Any]:
    """Return a batch for a type, with images if its model has several parts."""
    words = reference.config.get_text_config().vocab_size
    batch = batch_of(words, ROWS * dist.get_world_size() - 1, starts, parents)
    return images.add_images(reference, kind, batch) if kind in images.WHOLE else batch


def batch_of(words: int, length: int, begin: Sequence[int] = (), parents: Sequence[int] = ()) -> dict[str, Any]:
    """Return random tokens with labels, most of them on the last rank; of documents or segments, if they begin."""
    ids = torch.randint(4, words - 2, (1 if begin else 2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, : length // 3] = IGNORED
    labels[:, 7::5] = IGNORED
    if not begin:
        return {"input_ids": ids, "labels": labels}
    if parents:  # a first child follows its parent
        labels[:, [start for at, start in enumerate(begin) if parents[at] != at - 1]] = IGNORED
        lengths = [hi - lo for lo, hi in pairwise((*begin, length))]
        return {"input_ids": ids, "labels": labels, "prompt_tree": (lengths, parents)}
    starts = torch.zeros(length, dtype=torch.long)
    starts[list(begin)] = torch.tensor(begin)
    labels[:, list(begin)] = IGNORED
    return {"input_ids": ids, "labels": labels, "position_ids": (torch.arange(length) - starts.cummax(0).values)[None]}
