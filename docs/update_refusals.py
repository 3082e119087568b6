"""Write docs/refusals.md, which git ignores, for the site: `python docs/update_refusals.py`. `.ci/docs.sh` calls it."""

from __future__ import annotations

from pathlib import Path

from dfa_megatron.deepspeed import refusals as of_deepspeed
from dfa_megatron.huggingface import refusals as of_huggingface
from dfa_megatron.megatron import refusals as of_megatron
from dfa_megatron.refusals import markdown

FRAMEWORKS = {
    "Megatron-Core": of_megatron.STAGES,
    "DeepSpeed": of_deepspeed.STAGES,
    "Hugging Face": of_huggingface.STAGES,
}
HEAD = """# What is refused

A request that an integration would not honour is refused by name, at set-up wherever it can be known there.
Each line is the error of the smallest such request.
"""


def page() -> str:
    """Return the page: a table for each stage, printed from its rows."""
    return "\n".join([HEAD, *(f"## {name}\n\n{markdown(stages)}\n" for name, stages in FRAMEWORKS.items())])


if __name__ == "__main__":
    Path(__file__).with_name("refusals.md").write_text(page(), encoding="utf-8")
