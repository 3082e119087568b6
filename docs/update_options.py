"""Write the table of options.md from DistAttentionConfig: `python docs/update_options.py`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from dfa_megatron.config import DistAttentionConfig

PAGE = Path(__file__).with_name("options.md")
START, END = "<!-- options -->\n", "<!-- /options -->"


def table() -> list[str]:
    """A line for each option: its names, its values with the default first, its help."""
    lines = ["| option | values, the default first | meaning |", "|---|---|---|"]
    for field in fields(DistAttentionConfig):
        default = field.default
        values = [str(default), *(value for value in field.metadata["choices"] or () if value != default)]
        if isinstance(default, bool):
            values = ["False", "True"]
        shown = ", ".join(f"`{value}`" for value in values)
        lines.append(f"| `{field.name}` | {shown} | {field.metadata['help']} |")
    return lines


def page(text: str) -> str:
    """The page with its table made anew."""
    before, rest = text.split(START)
    return before + START + "\n".join(table()) + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
