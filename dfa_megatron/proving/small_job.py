"""A configuration made small: what is smaller than asked for, and the proof of it on this machine's ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dfa_megatron.config import TrainingConfig
from dfa_megatron.proving.job import TOKENS
from dfa_megatron.proving.verdict import Proof, columns

HEAD, HIDDEN, FFN, VOCABULARY, LAYERS, EXPERTS = 16, 64, 96, 96, 8, 8
"""Head dimension, width, width of MLPs, vocabulary, layers and experts, where the user's are more."""

MOST_RANKS = 8
"""Processes at most."""

LEAST_WINDOW = 5
"""A window is no shorter."""


class Reductions(list[tuple[str, str, str]]):
    """What runs smaller or otherwise: its name, as it was asked for, as it runs."""

    def note(self, what: str, asked: object, runs: object) -> None:
        """Add a line, unless both are the same; True reads as "on", False as "off"."""
        said, done = ({True: "on", False: "off"}[x] if type(x) is bool else str(x) for x in (asked, runs))
        if said != done:
            self.append((what, said, done))


class Small:
    """Hold a configuration as a dictionary; `names` has an entry's own name by its common one, where they differ."""

    def __init__(self, values: dict[str, Any], reduced: Reductions, names: Mapping[str, str] | None = None) -> None:
        self.values, self.reduced, self.names = values, reduced, names or {}

    def get(self, name: str) -> Any:
        """Return the entry, or None."""
        return self.values.get(self.names.get(name, name))

    def set(self, name: str, value: Any) -> None:
        """Change an entry that is there, and list it."""
        key = self.names.get(name, name)
        if key in self.values:
            self.reduced.note(key, self.values[key], value)
            self.values[key] = value

    def most(self, *names: str, most: int) -> None:
        """Bound numbers."""
        for name in names:
            if type(given := self.get(name)) is int and given > most:
                self.set(name, most)


@dataclass(frozen=True, slots=True)
class SmallJob:
    """What a command line asks for.

    ranks: processes that it takes.
    reduced: all that is not as asked for.
    prove: makes the model in a process group of as many ranks, and proves it.
    """

    ranks: int
    reduced: Reductions
    prove: Callable[[], Proof]

    def __str__(self) -> str:
        """Return the table of what is not as asked for."""
        return "\n".join(columns(("reduced", "asked for", "checked with"), self.reduced))


def on_cpu(options: TrainingConfig, reduced: Reductions) -> dict[str, Any]:
    """Return the options that a CPU runs in place of those that need a GPU."""
    instead: dict[str, Any] = {"transport": "auto", "remat_offload": False}
    if options.kernel not in ("auto", "reference", "cpu"):
        instead["kernel"] = "auto"
    for name, runs in instead.items():
        reduced.note(name, getattr(options, name), runs)
    return instead


def window_of(window: int, length: int | None, ranks: int) -> int:
    """Return a window that is as large a part of the proof's tokens as the given one is of the user's."""
    few = TOKENS * ranks
    return min(window, max(LEAST_WINDOW, round(window * few / max(length or few, few))))


def fewer(sizes: dict[str, int]) -> dict[str, int]:
    """Return sizes, whose product is the number of ranks, halved from the first on until it is at most MOST_RANKS."""
    made = dict(sizes)
    for name in made:
        while math.prod(made.values()) > MOST_RANKS and made[name] > 2:
            made[name] = (made[name] + 1) // 2
    return made


def fewest_groups(groups: int, ratio: int, degree: int, tp: int = 1) -> int:
    """Return as few key/value heads as Ulysses' degree and tensor parallelism need, `ratio` heads to each."""
    enough = (n for n in range(1, groups + 1) if n >= min(2, groups) and n % tp == 0 and n * ratio % degree == 0)
    return next(enough, groups)


@torch.no_grad()
def enlarge(model: torch.nn.Module) -> None:
    """Scale weights so that attention matters as it does not at the start of a training; alike where they are alike."""
    for parameter in model.parameters():
        size = parameter.float().square().mean().sqrt()
        if parameter.dim() > 1 and size > 0:
            parameter.mul_(parameter.shape[-1] ** -0.5 / size)
