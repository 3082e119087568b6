"""Write the table of options.md from DistAttentionConfig: `python docs/update_options.py`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.names import SCOPES

PAGE = Path(__file__).with_name("options.md")
START, END = "<!-- options -->\n", "<!-- /options -->"


def table() -> str:
    """Return the options as a table: names, values, scopes, meaning."""
    lines = ["| option | values, the default first | where | meaning |", "|---|---|---|---|"]
    for spec in fields(DistAttentionConfig):
        about = spec.metadata
        values: Iterable[object] = dict.fromkeys((spec.default, *(about["choices"] or ())))
        if isinstance(spec.default, bool):
            values = (False, True)
        shown = ", ".join(f"`{value}`" for value in values)
        shown += ", `1`, `2`, ..." if about["numbers"] and about["choices"] else ""
        where = "all" if about["scope"] == SCOPES else ", ".join(about["scope"])
        lines.append(f"| `{spec.name}` | {shown} | {where} | {about['help']} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table of today's options."""
    before, rest = text.split(START)
    return before + START + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
