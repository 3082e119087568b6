"""Write docs/refusals.md from the rows of the tables of refusals: `python docs/update_refusals.py`."""

from __future__ import annotations

from pathlib import Path

from dfa_megatron.deepspeed import refusals as of_deepspeed
from dfa_megatron.huggingface import refusals as of_huggingface
from dfa_megatron.megatron import refusals as of_megatron
from dfa_megatron.refusals import markdown

HEAD = """# What is refused

A request that an integration would not honour is refused by name, at set-up wherever it can be known there.
Each line is the error of the smallest such request.
`docs/update_refusals.py` writes this page from the tables in the package.
"""

if __name__ == "__main__":
    frameworks = {"Megatron-Core": of_megatron, "DeepSpeed": of_deepspeed, "Hugging Face": of_huggingface}
    parts = [HEAD, *(f"## {name}\n\n{markdown(tables.STAGES)}\n" for name, tables in frameworks.items())]
    Path(__file__).with_name("refusals.md").write_text("\n".join(parts), encoding="utf-8")
