"""The pages of schedules cannot lie: their pictures and grid are what the code computes today."""

from __future__ import annotations

from pathlib import Path

from docs import schedules

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pictures_are_those_of_the_code_and_all_are_shown() -> None:
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("schedules.md", "same-bits.md"))
    for name, svg in schedules.pictures().items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == svg, "run `python -m docs.update`"
        assert f"pictures/{name}" in text


def test_the_grid_that_is_explained_is_the_golden_one() -> None:
    golden = (DOCS.parent / "tests" / "golden" / "balanced_p8.txt").read_text(encoding="utf-8")
    grid = golden.split("\n\n")[0].rsplit("\n", 1)[0]  # without the last row, in which only results travel
    assert grid in (DOCS / "schedules.md").read_text(encoding="utf-8")
