"""Make a configuration small, with a line for each change; the sizes are the same for every framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dfa_megatron.selfcheck.case import Reductions

ROWS, HEAD, HIDDEN, FFN, VOCABULARY, LAYERS, EXPERTS = 16, 16, 64, 96, 96, 8, 8
"""Tokens of a rank, head dimension, width, width of MLPs, vocabulary, layers and experts, where the user's are more."""


STATE_EPS = 1e-2
"""Of norms: a state that few tokens have filled is small, and a norm with a smaller eps would enlarge its rounding."""
STATE_TOLERANCE = 2e-3
"""Of models with states, which are sums of many exponentials in float32."""


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


def fewest_groups(groups: int, ratio: int, degree: int, tp: int = 1) -> int:
    """Return as few key/value heads as Ulysses' degree and tensor parallelism need, `ratio` heads to each."""
    enough = (n for n in range(1, groups + 1) if n >= min(2, groups) and n % tp == 0 and n * ratio % degree == 0)
    return next(enough, groups)
