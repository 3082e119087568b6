"""Tell which model types of transformers are exact: a table and a list in the package, from the sweep."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from docs.raw_results import table

DOCS = Path(__file__).parent
RESULTS = DOCS / "models.json"
LIST = DOCS.parent / "dfa_megatron" / "huggingface" / "checks" / "exact_types.py"


def results() -> dict[str, Any]:
    """Return the file of `make models`."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def exact_types() -> list[str]:
    """Return the types whose whole sequences are exact, as the configurations of such models name them."""
    return sorted({found.get("as", kind) for kind, found in results()["types"].items() if found["plain"] == "exact"})


def counts() -> list[str]:
    """Return how many types are in which state."""
    found = results()
    told = Counter(states["plain"] for states in found["types"].values())
    shown = ", ".join(f"{number} {state}" for state, number in told.most_common())
    return [f"transformers {found['transformers']}, {found['ranks']} ranks against one process in float64: {shown}."]


def refused() -> list[str]:
    """Return the types that do not run, by the reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for kind, states in results()["types"].items():
        if states["plain"] != "exact":
            said = re.search(r"Not supported: .*?: (.*)\. What works: (.*)\.$", states["reason"])
            why, works = said.groups() if said else (f"not run: {states['reason']}", "")
            reasons.setdefault((why.replace("|", " "), works), []).append(kind)
    lines = [[", ".join(kinds), *reason] for reason, kinds in sorted(reasons.items(), key=lambda one: -len(one[1]))]
    return table(["types", "why", "what works"], lines)


def types() -> list[str]:
    """Return the table of the types that run."""
    found, sections = results(), results()["sections"]
    lines = [
        [kind, *(states.get(section, "") for section in sections), states.get("reason", "").replace("|", " ")]
        for kind, states in found["types"].items()
        if states["plain"] == "exact"
    ]
    return table(["type", *sections, "reason"], lines)


def list_of_types() -> str:
    """Return the text of the package's list."""
    names = textwrap.fill(", ".join(f'"{kind}"' for kind in exact_types()), 116, break_on_hyphens=False)
    return (
        '"""List the model types that `make models` found exact; `python -m docs.update` writes this file."""\n\n'
        f"EXACT = (\n{textwrap.indent(names, '    ')},\n)  # fmt: skip\n"
    )


TABLES = {"counts": counts, "refused": refused, "types": types}
"""Of docs/huggingface.md."""
