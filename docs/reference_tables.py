"""The table of options.md: every option."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.names import SCOPES


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
