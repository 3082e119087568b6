"""Write the tables of measured figures: `python docs/update_performance.py`. A test says which page is behind.

`performance_tables.py` describes each table; every figure comes from a file of `benchmarks/results`. In a page a table
stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tables() -> dict[str, dict[str, list[str]]]:
    """Return the lines of every table, by page (a path from the repository's root) and name."""
    spec = importlib.util.spec_from_file_location(
        "performance_tables", Path(__file__).with_name("performance_tables.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {page: {name: make() for name, make in makers.items()} for page, makers in module.PAGES.items()}


def page(text: str, parts: dict[str, list[str]]) -> str:
    """Return a page with its tables written again.

    Raises:
        ValueError: the page lacks the place of a table.
    """
    for name, lines in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, rest = text.split(start)
        text = before + start + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1]
    return text


def main() -> None:
    """Write every page."""
    for name, parts in tables().items():
        path = ROOT / name
        path.write_text(page(path.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    main()
