"""Refusals as rows of tables: a predicate, the three parts of the error, and an example that tests and documents it.

Each framework has one `Stage` for each moment at which it looks at a request. The docs site has a page of all rows,
and tests/test_refusals.py checks every row by its example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError


class Asked:
    """The facts of one request, as attributes; a fact that nobody stated is None.

    Args:
        sources: objects and mappings with the facts, the later ones first. The fields of a `DistAttentionConfig` get
            the prefix `dfa_`.
        facts: single facts.
    """

    def __init__(self, *sources: Any, **facts: Any) -> None:
        for source in sources:
            if isinstance(source, DistAttentionConfig):
                facts |= {f"dfa_{spec.name}": getattr(source, spec.name) for spec in fields(source)}
            elif source is not None:
                facts |= source if isinstance(source, Mapping) else vars(source)
        vars(self).update(facts)

    def __getattr__(self, name: str) -> Any:
        """Return None, the value of a fact that nobody stated."""
        return None


@dataclass(frozen=True, slots=True)
class Refusal:
    """One request that is refused.

    what, why and instead may name facts of the request: '{window_size}'.
    """

    applies: Callable[[Asked], object]
    what: str
    why: str
    instead: str
    example: Mapping[str, Any]
    """The fewest facts for which the row applies."""

    def error(self, asked: Asked) -> UnsupportedError:
        """Return the error for a request to which the row applies."""
        stated = defaultdict(lambda: None, vars(asked))
        return UnsupportedError(*(text.format_map(stated) for text in (self.what, self.why, self.instead)))


def stated(fact: str, what: str, why: str, instead: str, example: Any = True, **more: Any) -> Refusal:
    """Return the row that applies where a fact is stated and true.

    Args:
        fact: its name.
        what: as of `Refusal`, and so are why and instead.
        why: the reason.
        instead: the alternative.
        example: the fact's value in the row's example.
        more: further facts of the example, which the text names.
    """
    return Refusal(lambda asked: vars(asked).get(fact), what, why, instead, {fact: example, **more})


@dataclass(frozen=True, slots=True)
class Stage:
    """The rows that are checked at one moment.

    title: the moment, as the heading of the table in the documentation.
    options: those that an example leaves unsaid.
    """

    title: str
    rows: tuple[Refusal, ...]
    options: DistAttentionConfig = field(default_factory=DistAttentionConfig)

    def check(self, *sources: Any, **facts: Any) -> None:
        """Refuse a request, given as for `Asked`, with the first row that applies.

        Raises:
            UnsupportedError: a row applies; it names the request, the reason and an alternative.
        """
        asked = Asked(*sources, **facts)
        for row in self.rows:
            if row.applies(asked):
                raise row.error(asked)
