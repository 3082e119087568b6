"""Write docs/refusals.md from the rows of the tables of refusals: `python docs/update_refusals.py`."""

from __future__ import annotations

from pathlib import Path

from dfa_megatron.megatron import refusals as of_megatron
from dfa_megatron.refusals import markdown

HEAD = """# What is refused

A request that an integration would not honour is refused by name, at set-up wherever it can be known there.
Each line is the error of the smallest such request.
`docs/update_refusals.py` writes this page from the tables in the package.
"""

if __name__ == "__main__":
    parts = [HEAD, f"## Megatron-Core\n\n{markdown(of_megatron.STAGES)}\n"]
    Path(__file__).with_name("refusals.md").write_text("\n".join(parts), encoding="utf-8")
