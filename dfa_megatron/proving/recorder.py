"""Run a text, and record sketches of what every layer gives for each token, and of every gradient.

A sketch has the rows of a tensor projected onto a few random directions, so that whole tensors need not be kept.
"""

from __future__ import annotations

import functools
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.proving.job import Job, Text
from dfa_megatron.proving.routing import Choices, follow_keys, routing


@dataclass(slots=True)
class Recording:
    """What a run computed; sketches are (rows, 8) in float64.

    loss: the mean of the text, None of pipeline stages without it.
    hidden: of every watched module, in the order of the forward, all tokens in their order.
    backward: of its gradient, in the order of the backward.
    weights: of every parameter's gradient, or this rank's part of it.
    choices: of every router, and of keys, for all tokens.
    holders: the rank that gave each token.
    """

    loss: float | None = None
    hidden: dict[str, torch.Tensor] = field(default_factory=dict)
    backward: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    holders: torch.Tensor = field(default_factory=lambda: torch.empty(0))


def record(
    job: Job, text: Text, *, alone: bool = False, noise: bool = False, choices: Choices | None = None
) -> Recording:
    """Run a text over the ranks or alone, and put together what the ranks hold; a collective call.

    Args:
        job: the model.
        text: the same on every rank.
        alone: every rank computes the whole text.
        noise: add rounding noise to what attention gives.
        choices: of experts and keys, to be replayed.
    """
    found = Recording()
    places = job.places(text, alone=alone).cpu()
    share = 1.0 if alone else job.share

    def keys(name: str, out: torch.Tensor) -> torch.Tensor | None:
        return follow_keys(out, (name, 0), len(text.ids) // text.documents, places, found.choices, choices)

    watching = _watching(job, found, len(places), share, noise, keys)
    with watching, routing(job.models, places, found.choices, choices):
        loss = job.step(text, alone=alone)
    found.loss = None if loss is None else float(loss.detach())
    found.weights = {name: sketch(gradient) for name, gradient in job.gradients()}
    job.clear()
    if job.sums and not alone and job.group is not None:
        for name, each in found.weights.items():
            total = each.to(text.ids.device)
            dist.all_reduce(total, group=job.group)
            found.weights[name] = total.cpu() / job.ranks
    _join(job, found, places, len(text.ids))
    return found


@contextmanager
def _watching(
    job: Job, found: Recording, rows: int, share: float, noise: bool, keys: Callable[..., Any]
) -> Iterator[None]:
    def hook(name: str, attention: bool) -> Callable[..., Any]:
        def after(module: torch.nn.Module, args: Any, output: Any) -> Any:
            out = output[0] if isinstance(output, tuple) else output
            if not isinstance(out, torch.Tensor) or out.dim() < 2 or out.shape[:-1].numel() != rows:
                return None
            if not out.is_floating_point():
                return keys(name, out)
            if noise and attention:
                out = noisy(out, name)
            found.hidden[name] = sketch(out.flatten(0, -2))
            if out.requires_grad:

                def take(gradient: torch.Tensor) -> None:
                    found.backward[name] = sketch(gradient.flatten(0, -2)) * share

                out.register_hook(take)
            if noise and attention:
                return (out, *output[1:]) if isinstance(output, tuple) else out
            return None

        return after

    hooks = [module.register_forward_hook(hook(name, attention)) for name, module, attention in job.watched()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _join(job: Job, found: Recording, places: torch.Tensor, tokens: int) -> None:
    """Put the rows of all ranks in the order of the tokens."""
    ranks = [0] if job.group is None else dist.get_process_group_ranks(job.group)
    held: list[Any] = [(places, found.hidden, found.backward, found.choices)]
    if len(ranks) > 1:
        held = gathered(held[0], job.device, job.group)
    found.holders = torch.zeros(tokens, dtype=torch.long)
    for rank, (at, *_) in zip(ranks, held, strict=True):
        found.holders[at] = rank
    for number, into in ((1, found.hidden), (2, found.backward), (3, found.choices)):
        for key in dict.fromkeys(key for each in held for key in each[number]):
            first = next(each[number][key] for each in held if key in each[number])
            whole = torch.zeros((tokens, *first.shape[1:]), dtype=first.dtype)
            for at, *each in held:
                if key in each[number - 1]:
                    whole[at] = each[number - 1][key]
            into[key] = whole


def gathered(mine: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank brings: tensors, numbers and texts in tuples, lists and dictionaries; no other type."""
    file = io.BytesIO()
    torch.save(mine, file)
    part = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, sizes[0] + len(part), group=group)
    parts = [part.new_empty(int(max(sizes))) for _ in sizes]
    dist.all_gather(parts, torch.nn.functional.pad(part, (0, len(parts[0]) - len(part))), group=group)
    files = (x[: int(size)].cpu().numpy().tobytes() for x, size in zip(parts, sizes, strict=True))
    return [torch.load(io.BytesIO(each), weights_only=True) for each in files]


DIRECTIONS = 8


@functools.lru_cache(maxsize=64)
def _directions(columns: int, device: torch.device) -> torch.Tensor:
    draw = torch.Generator().manual_seed(columns)
    directions = torch.randn(columns, DIRECTIONS, generator=draw, dtype=torch.float64)
    return directions.div_(DIRECTIONS**0.5).to(device)


def sketch(x: torch.Tensor) -> torch.Tensor:
    """Return (rows, 8) of (rows, ...), float64 on the CPU, with nearly the lengths of the rows; a vector is one row."""
    x = x.detach()
    rows = x.reshape(1, -1) if x.dim() < 2 else x.flatten(1)
    wide = rows.double() if rows.numel() < 1 << 24 else rows.float()  # what is large is slow in float64 on a GPU
    return (wide @ _directions(rows.shape[1], x.device).to(wide.dtype)).double().cpu()


def noisy(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return x with noise as large as the rounding of its dtype, and the same for its gradient, drawn from a name."""
    noised: torch.Tensor = _Noise.apply(x, zlib.crc32(name.encode()))  # type: ignore[no-untyped-call]
    return noised


class _Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seed: int) -> torch.Tensor:
        ctx.seed = seed
        return _rounded(x, seed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _rounded(gradient, ctx.seed + 1), None


def _rounded(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return x with normal noise: eps times the size of each row's entries."""
    draw = torch.Generator(x.device).manual_seed(seed)
    wide = x.float() if x.dtype.itemsize < 4 else x
    size = wide.square().mean(-1, keepdim=True).sqrt() * torch.finfo(x.dtype).eps
    return (wide + size * torch.randn(x.shape, generator=draw, device=x.device, dtype=wide.dtype)).to(x.dtype)
