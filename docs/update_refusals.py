"""Write docs/refusals.md, which git ignores, for the site: `python docs/update_refusals.py`. `.ci/docs.sh` calls it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dfa_megatron.deepspeed import refusals as of_deepspeed
from dfa_megatron.huggingface import refusals as of_huggingface
from dfa_megatron.megatron import refusals as of_megatron
from dfa_megatron.refusals import Asked, Stage

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


def markdown(stages: Sequence[Stage]) -> str:
    """Return the stages as Markdown: a heading and a table each, with the error that each row's example gets."""
    return "\n\n".join("\n".join(_lines(stage)) for stage in stages)


def _lines(stage: Stage) -> Iterator[str]:
    yield from (f"### {stage.title}", "", "| refused | because | what works |", "|---|---|---|")
    for row in stage.rows:
        error = row.error(Asked(stage.options, row.example))
        cells = (text.replace("|", "\\|") for text in (error.what, error.why, error.instead))
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    Path(__file__).with_name("refusals.md").write_text(page(), encoding="utf-8")
