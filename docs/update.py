"""Write the tables and pictures of the pages: `python -m docs.update`. Tests say which page is behind.

    python -m docs.update REPORT ...        take in results of `pytest --support-report REPORT` first

A table stands in its page between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from docs import (
    fault_tables,
    house_picture,
    mask_tables,
    model_tables,
    paper_tables,
    performance_tables,
    planning_tables,
    reference_tables,
    refusal_tables,
    scale_tables,
    schedule_tables,
    support_tables,
)

DOCS = Path(__file__).parent
ROOT = DOCS.parent
Tables = Mapping[str, Callable[[], list[str]]]

PAGES: dict[str, Tables] = {
    **performance_tables.PAGES,
    **paper_tables.PAGES,
    **mask_tables.PAGES,
    "README.md": {**performance_tables.PAGES["README.md"], "tested": reference_tables.tested},
    "docs/huggingface.md": model_tables.TABLES,
    "docs/options.md": {"options": reference_tables.options, "meanings": reference_tables.meanings},
    "docs/planning.md": planning_tables.TABLES,
    "docs/refusals.md": {
        name: partial(refusal_tables.of_statements, name) for name in ("megatron", "deepspeed", "huggingface")
    },
    "docs/schedules.md": {"choices-8": schedule_tables.TABLES["choices-8"]},
    "docs/schedule-theory.md": {
        **{name: schedule_tables.TABLES[name] for name in ("costs-8", "packs")},
        **scale_tables.TABLES,
    },
    "docs/support.md": support_tables.TABLES,
    "docs/trust.md": {**performance_tables.PAGES["docs/trust.md"], **fault_tables.TABLES},
}
"""The tables of each page, a path from the repository's root, by the name between its marks."""

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
