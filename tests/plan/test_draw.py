"""Drawings: golden grids, a picture that is valid on its own."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dfa_megatron.cli.draw import draw
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.cost.choose import simulate
from dfa_megatron.plan.cost.hardware import IDEAL_LINK
from dfa_megatron.plan.language.mask import causal, sliding_window
from dfa_megatron.plan.language.sizes import Sizes
from tests.support.plan_cases import WAYS, plan_of

GOLDEN = Path(__file__).parent.parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_the_grid_of_a_schedule_is_the_reviewed_one(golden: Path) -> None:
    """The name of a file is that of the schedule or layout, and the number of ranks: `balanced_p4.txt`."""
    schedule, _, ranks = golden.stem.rpartition("_p")
    drawn = draw(plan_of(schedule, causal(int(ranks) * 4), int(ranks)))
    assert drawn + "\n" == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("ranks", [4, 8, 32])
def test_a_grid_fits_the_width_it_is_given(ranks: int) -> None:
    for plan in (plan_of(schedule, causal(ranks * 4), ranks) for schedule in WAYS):
        for width in (40, 60, 80, 100, 200):
            text = draw(plan, phase="forward", width=width)
            assert max(map(len, text.splitlines()[1:])) <= width
            assert all(re.search(rf"\br{rank}\b", text) for rank in range(ranks))


@pytest.mark.parametrize("schedule", WAYS)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_picture_is_valid_and_needs_nothing_from_outside(schedule: str, ranks: int) -> None:
    text = draw(plan_of(schedule, causal(ranks * 4096), ranks), "svg", sizes=Sizes(kv_heads=8))
    root = ElementTree.fromstring(text)  # noqa: S314 we wrote it ourselves
    assert root.tag == f"{SVG}svg"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert not {"script", "image", "use", "foreignObject"} & {node.tag.removeprefix(SVG) for node in root.iter()}
    assert "prefers-color-scheme: dark" in text
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for node in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(node.attrib[name]) for name in ("x", "y", "width", "height"))
        assert w > 0
        assert h > 0
        if "patternUnits" not in node.attrib:
            assert x >= 0
            assert x + w <= width + 1
            assert y + h <= height


@pytest.mark.parametrize("schedule", WAYS)
def test_a_picture_has_every_block_and_every_message(schedule: str) -> None:
    plan = plan_of(schedule, causal(8 * 4096), 8).backward
    timeline = simulate(plan, hardware=IDEAL_LINK)
    root = ElementTree.fromstring(draw(plan, "svg", hardware=IDEAL_LINK))  # noqa: S314 we wrote it ourselves
    shapes = [node.attrib.get("class") for node in root.iter(f"{SVG}rect") if node.find(f"{SVG}title") is not None]
    computed = sum(bool(e.blocks) for e in timeline.events)
    names = sum(e.label.count("+") + 1 for e in timeline.events if e.kind == "receive")
    assert sum(kind in ("own", "diagonal", "helper") for kind in shapes) == computed
    assert sum(kind in ("kv", "q", "result") for kind in shapes) == names


def test_the_title_tells_the_schedule_and_the_heading_the_idle_share() -> None:
    text = draw(plan_of("balanced", causal(65536), 8), "svg", phase="forward", hardware=IDEAL_LINK)
    assert "balanced schedule, causal mask, 65,536 tokens, 8 ranks" in text
    assert re.search(r"forward: [\d.]+ ms, idle 11\.1 %", text)


def test_one_phase_can_be_drawn_alone() -> None:
    plan = plan_of("ring", sliding_window(32, 5), 4)
    assert draw(plan, phase="backward") == draw(plan.backward)
    assert "forward" not in draw(plan.backward, "svg")


@pytest.mark.parametrize(("arguments", "complaint"), [({"style": "oil"}, "text, svg"), ({"phase": "x"}, "both")])
def test_an_unknown_style_or_phase_is_refused(arguments: dict[str, str], complaint: str) -> None:
    with pytest.raises(UnsupportedError, match=complaint):
        draw(plan_of("ring", causal(8), 2), **arguments)  # type: ignore[arg-type]
