"""Tell which model types of transformers are exact: a table of the site and a list in the package, from the sweep."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

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


def types() -> list[str]:
    """Return the table of all types, with the counts above it."""
    found = results()
    counts = Counter(states["plain"] for states in found["types"].values())
    told = ", ".join(f"{state} {number}" for state, number in counts.most_common())
    sections = found["sections"]
    out = [
        f"transformers {found['transformers']}, {found['ranks']} ranks against one process in float64: {told}.",
        "",
        f"| type | {' | '.join(sections)} | reason |",
        "|---" * (2 + len(sections)) + "|",
    ]
    for kind, states in found["types"].items():
        cells = [states.get(section, "") for section in sections]
        out.append(f"| {kind} | {' | '.join(cells)} | {states.get('reason', '').replace('|', ' ')} |")
    return out


def list_of_types() -> str:
    """Return the text of the package's list."""
    names = textwrap.fill(", ".join(f'"{kind}"' for kind in exact_types()), 116, break_on_hyphens=False)
    return (
        '"""List the model types that `make models` found exact; `python -m docs.update` writes this file."""\n\n'
        f"EXACT = (\n{textwrap.indent(names, '    ')},\n)  # fmt: skip\n"
    )


TABLES = {"types": types}
"""For the site alone."""
