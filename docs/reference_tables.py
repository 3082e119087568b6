"""The tables of options.md and refusals.md: every option, and every refusal with the error of its example."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import fields

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.names import SCOPES
from dfa_megatron.refusals import Asked, Stage


def options(whole: bool = True) -> list[str]:
    """Return the options: names, values, scopes, and the meaning or its first sentence."""
    lines = ["| option | values, the default first | where | meaning |", "|---|---|---|---|"]
    for spec in fields(DistAttentionConfig):
        about = spec.metadata
        values: Iterable[object] = dict.fromkeys((spec.default, *(about["choices"] or ())))
        if isinstance(spec.default, bool):
            values = (False, True)
        shown = ", ".join(f"`{value}`" for value in values)
        shown += ", `1`, `2`, ..." if about["numbers"] and about["choices"] else ""
        where = "all" if about["scope"] == SCOPES else ", ".join(about["scope"])
        meaning = about["help"] if whole else about["help"].partition(". ")[0].partition(":")[0].rstrip(".") + "."
        lines.append(f"| `{spec.name}` | {shown} | {where} | {meaning} |")
    return lines


def refusals(framework: str) -> list[str]:
    """Return a framework's refusals: a heading and a table for each stage. Megatron's need Megatron-Core."""
    stages = importlib.import_module(f"dfa_megatron.{framework}.refusals").STAGES
    return [line for stage in stages for line in _lines(stage)]


def _lines(stage: Stage) -> Iterator[str]:
    yield from (f"### {stage.title}", "", "| refused | because | what works |", "|---|---|---|")
    for row in stage.rows:
        error = row.error(Asked(stage.options, row.example))
        cells = (text.replace("|", "\\|") for text in (error.what, error.why, error.instead))
        yield f"| {' | '.join(cells)} |"
    yield ""
