"""Write the tables and pictures of the pages: `python -m docs.update`. Tests say which page is behind.

    python -m docs.update REPORT ...        take in results of `pytest --support-report REPORT` first
    python -m docs.update --show support    print a page as the site has it

A table stands in its page between `<!-- NAME -->` and `<!-- /NAME -->`. A table that only the site shows has
`<!-- site: NAME -->` in its place. `conf.py` fills these, and puts in those that are longer on the site.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from docs import (
    automatic_tables,
    fault_tables,
    house_picture,
    model_tables,
    paper_tables,
    performance_tables,
    reference_tables,
    refusal_tables,
    scale_tables,
    schedule_tables,
    support_tables,
)

DOCS = Path(__file__).parent
ROOT = DOCS.parent
Tables = Mapping[str, Callable[[], list[str]]]

ON_SITE = {
    "performance": ("eight", "half-a-million", "transports", "without-link", "packed", "pack-programs"),
    "schedules": ("choices-8", "packs"),
}
"""Measured and simulated tables that only the site shows, by page."""


def parted(page: str, tables: Tables) -> tuple[Tables, Tables]:
    """Return the tables that a page shows, and those that only the site shows there."""
    apart = ON_SITE[page]
    return {k: v for k, v in tables.items() if k not in apart}, {name: tables[name] for name in apart}


MEASURED, MEASURED_ON_SITE = parted("performance", performance_tables.PAGES["docs/performance.md"])
SIMULATED, SIMULATED_ON_SITE = parted("schedules", schedule_tables.TABLES)
PAGES: dict[str, Tables] = {
    **performance_tables.PAGES,
    "docs/performance.md": MEASURED,
    **paper_tables.PAGES,
    "docs/options.md": {"options": partial(reference_tables.options, whole=False)},
    "docs/schedules.md": SIMULATED,
    "docs/trust.md": {**performance_tables.PAGES["docs/trust.md"], "faults": fault_tables.in_short},
}
"""The tables of each page, a path from the repository's root, by the name between its marks."""

SITE: dict[str, Tables] = {
    "refusals": {
        name: partial(refusal_tables.of_statements, name) for name in ("deepspeed", "huggingface", "megatron")
    },
    "performance": {**automatic_tables.SITE, **MEASURED_ON_SITE},
    "schedules": {**scale_tables.SITE, **SIMULATED_ON_SITE},
    "support": support_tables.TABLES,
    "huggingface": model_tables.TABLES,
    "trust": {"faults": fault_tables.every},
    "options": {"options": reference_tables.options},
}
"""The tables that only the site shows, and those that are longer there, by page and name."""


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


def for_site(page: str, text: str) -> str:
    """Return a page, named as Sphinx does, with the tables that only the site shows.

    Raises:
        KeyError: the page names a table that nothing makes.
    """
    tables = SITE.get(page, {})
    longer = {name: make for name, make in tables.items() if name in PAGES.get(f"docs/{page}.md", {})}
    return re.sub(r"<!-- site: ([\w-]+) -->", lambda found: "\n".join(tables[found[1]]()), filled(text, longer))


def main(arguments: list[str]) -> None:
    """Take in the reports and write every page and list, or print one page."""
    if arguments[:1] == ["--show"]:
        name = arguments[1]
        print(for_site(name, (DOCS / f"{name}.md").read_text(encoding="utf-8")))
        return
    for report in arguments:
        lines = Path(report).read_text(encoding="utf-8").splitlines()
        support_tables.take_in(lines)
        fault_tables.take_in(lines)
    for name, tables in PAGES.items():
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8"), tables), encoding="utf-8")
    JSON_SCHEMA.write_text(json_schema(), encoding="utf-8")
    model_tables.LIST.write_text(model_tables.list_of_types(), encoding="utf-8")
    for picture, svg in {**schedule_tables.pictures(), "house.svg": house_picture.picture()}.items():
        (DOCS / "pictures" / picture).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
