"""The table of options.md: every option."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from dfa_megatron.config import CONFIGS, MegatronConfig


def options(whole: bool = True) -> list[str]:
    """Return the options: names, values, where they are set, and the meaning or its first sentence."""
    lines = ["| option | values, the default first | where | meaning |", "|---|---|---|---|"]
    where_set = dict(zip(("all", "frameworks", "Megatron"), CONFIGS, strict=True))
    for spec in fields(MegatronConfig):
        about = spec.metadata
        values: Iterable[object] = dict.fromkeys((spec.default, *(about["choices"] or ())))
        if isinstance(spec.default, bool):
            values = (False, True)
        shown = ", ".join(f"`{value}`" for value in values)
        shown += ", `1`, `2`, ..." if about["numbers"] and about["choices"] else ""
        where = next(w for w, config in where_set.items() if spec.name in config.__dataclass_fields__)
        meaning = about["help"] if whole else about["help"].partition(". ")[0].partition(":")[0].rstrip(".") + "."
        lines.append(f"| `{spec.name}` | {shown} | {where} | {meaning} |")
    return lines
