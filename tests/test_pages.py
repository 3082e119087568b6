"""The pages: their links lead somewhere, and their code runs where it can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from dfa_megatron import masks

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
RUNNABLE = (
    ("README.md", "shard_sequence(x"),
    ("docs/start.md", "kernel="),
    ("docs/masks.md", "mask=mask"),
    ("docs/masks.md", "mask=tree"),
)
"""Pages whose first Python code with these words runs, given q, k, v and a group."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize(("name", "words"), RUNNABLE)
def test_the_code_of_a_page_runs(name: str, words: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    code = next(block for block in blocks if words in block)
    names: dict[str, object] = {"group": None} | {x: torch.randn(1, 64, 4, 32) for x in "qkv"}
    exec(code, names)  # noqa: S102 our own page
    assert tuple(names["out"].shape) == (1, 64, 4, 32)  # type: ignore[attr-defined]


def test_the_page_says_what_a_tree_saves() -> None:
    prompt, answer, answers = 8192, 1024, 8
    tree = masks.prompt_tree([prompt, *[answer] * answers], [-1, *[0] * answers])
    repeated = masks.documents([prompt + answer] * answers)
    one, other = (f"{mask.length:,} tokens and {mask.area / 1e6:.0f} million pairs" for mask in (tree, repeated))
    text = " ".join((ROOT / "docs/masks.md").read_text(encoding="utf-8").split())
    assert f"takes {one}; with repeated prompts it takes {other.replace(' tokens', '').replace(' pairs', '')}" in text


def test_the_readmes_plan_is_changed_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    exec(next(block for block in blocks if "with_blocks" in block), {})  # noqa: S102 our own page
    assert "3.2*" in capsys.readouterr().out
