"""The tables of options.md: every option in a line, and what each value means. And of README: tested releases."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import fields

from dfa_megatron.config import CONFIGS, MegatronConfig
from dfa_megatron.runtime.environment import TESTED, span


def options() -> list[str]:
    """Return the options: names, values, where they are set, and what they are about."""
    lines = ["| option | values, the default first | where |", "|---|---|---|"]
    where_set = dict(zip(("all", "frameworks", "Megatron"), CONFIGS, strict=True))
    for spec in fields(MegatronConfig):
        about = spec.metadata
        values: Iterable[object] = dict.fromkeys((spec.default, *(about["choices"] or ())))
        if isinstance(spec.default, bool):
            values = (False, True)
        shown = ", ".join(f"`{value}`" for value in values)
        shown += ", `1`, `2`, ..." if about["numbers"] and about["choices"] else ""
        where = next(w for w, config in where_set.items() if spec.name in config.__dataclass_fields__)
        lines.append(f"| [`{spec.name}`](#{spec.name}) | {shown} | {where} |")
    return lines


def meanings() -> list[str]:
    """Return a section for each option: what it is about, then a line for each value that its help explains."""
    lines: list[str] = []
    for spec in fields(MegatronConfig):
        sentences = re.split(r"(?<=\.) (?=\S)", spec.metadata["help"])
        values = [re.sub(r"^(\w+): ", r"- `\1`: ", one) for one in sentences if re.match(r"\w+: ", one)]
        about = " ".join(sentence for sentence in sentences if not re.match(r"\w+: ", sentence))
        lines += [f"### {spec.name}", "", about, "", *values, ""]
    return lines


def tested() -> list[str]:
    """Return the releases that tests pass with, in a sentence."""
    return textwrap.wrap(f"Releases: {', '.join(f'{package} {span(package)}' for package in TESTED)}.", 120)
