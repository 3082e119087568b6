"""Write the tables and pictures of the pages: `python -m docs.update`. Tests say which page is behind.

    python -m docs.update REPORT ...        take in results of `pytest --support-report=REPORT` first

A table stands in its page between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from docs import measured, paper, planning, reference, schedules, support

DOCS = Path(__file__).parent
ROOT = DOCS.parent
Tables = Mapping[str, Callable[[], list[str]]]

PAGES: dict[str, dict[str, Callable[[], list[str]]]] = {}
"""The tables of each page, a path from the repository's root, by the name between its marks."""

for module in (measured, paper, planning, reference, schedules, support):
    for page, tables in module.PAGES.items():
        PAGES.setdefault(f"docs/{page}.md" if page != "README" else "README.md", {}).update(tables)

JSON_SCHEMA = ROOT / "configs/deepspeed/dist_flash_attention.schema.json"
"""The schema of DeepSpeed's configuration with the block, for editors."""


def json_schema() -> str:
    """Return the text of `JSON_SCHEMA`."""
    return json.dumps(DeepSpeedOptions.json_schema(), indent=2) + "\n"


def filled(text: str, tables: Tables) -> str:
    """Return a page with its tables written again.

    Raises:
        ValueError: the page lacks the place of a table.
    """
    for name, make in tables.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, rest = text.split(start)
        text = before + start + "\n".join(make()) + "\n" + end + rest.split(end, 1)[1]
    return text


def main(arguments: list[str]) -> None:
    """Take in the reports, and write every page and list."""
    for report in arguments:
        lines = Path(report).read_text(encoding="utf-8").splitlines()
        support.take_in(lines)
        support.take_in_faults(lines)
    for name, tables in PAGES.items():
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    JSON_SCHEMA.write_text(json_schema(), encoding="utf-8")
    for picture, svg in schedules.pictures().items():
        (DOCS / "pictures" / picture).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
