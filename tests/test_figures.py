"""Tables of the pages, that of refusals among them, are what the code and the files of benchmarks/results say."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest

from docs import measured, paper, reference, update

ROOT = Path(__file__).parents[1]
FOLDER = "performance measurements planning paper packed kernels megatron deepspeed trust"
PAGES = ("README.md", *(f"docs/{name}.md" for name in FOLDER.split()))
FIGURE = re.compile(r"\d ?(GiB|TFLOP/s|tokens/s|ms\b|times as fast)")
SOURCE = re.compile(
    r"benchmarks/results|(performance|measurements)\.md|commit [0-9a-f]{7}|simulat|from the plan|publishes|is kept"
    r"|out of memory"
)


def test_the_schema_of_deepspeeds_configuration_is_as_the_options_make_it() -> None:
    assert update.JSON_SCHEMA.read_text(encoding="utf-8") == update.json_schema(), "run `python -m docs.update`"


@pytest.mark.parametrize("name", update.PAGES)
def test_every_table_of_a_page_is_what_code_and_raw_files_say(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert update.filled(text, update.PAGES[name]) == text, "run `python -m docs.update`"


def test_every_mark_of_a_page_is_a_table_that_something_writes() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        marks = re.findall(r"<!-- ([\w-]+) -->", page.read_text(encoding="utf-8"))
        assert sorted(marks) == sorted(update.PAGES.get(page.relative_to(ROOT).as_posix(), ())), page.name


@pytest.mark.parametrize("name", PAGES)
def test_a_paragraph_with_a_measured_figure_names_its_source(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)  # generated
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # shown output
    bare = [part for part in text.split("\n\n") if FIGURE.search(part) and not SOURCE.search(part)]
    assert bare == []


def test_the_readme_counts_the_types_that_are_exact() -> None:
    types = json.loads((ROOT / "dfa_megatron" / "huggingface" / "models.json").read_text(encoding="utf-8"))["types"]
    exact = sum(states["plain"] == "exact" for states in types.values())
    assert f"[{exact} of {len(types)} types of transformers]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_new_file_of_a_cell_of_the_paper_replaces_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    asked = partial(paper.end_to_end, "paper-33h", 33, 33, "tp-te-full")
    assert asked() == "not run"
    shape = {"heads": 33, "groups": 33}
    cases = [("remat", 32, {"ms_per_layer": 2.0}), ("tp-te-full", 32, {"ms_per_layer": 3.0}),
             ("remat", 64, {"ms_per_layer": 2.0}), ("tp-te-full", 64, {"cannot": "33 heads"}),
             ("remat", 128, {"failed": "out of memory"}), ("tp-te-full", 128, {"ms_per_layer": 3.0})]  # fmt: skip
    rows = [{"mode": mode, "length": length * 1024, **shape, **figures} for mode, length, figures in cases]
    (tmp_path / "2026-01-01-2xh200-paper-33h.json").write_text(json.dumps({"layers": rows}))
    assert asked() == "2 GPUs: 1.50 at 32K, cannot at 64K, ours out of memory at 128K"


def test_a_cell_that_stands_for_two_rows_or_none_is_an_error() -> None:
    for where in ({"seq_length": 131072}, {"seq_length": 1}):
        with pytest.raises(LookupError, match="rows of"):
            measured.row(measured.GRID, **where)
        with pytest.raises(LookupError, match="rows of"):
            measured.cell({"file": measured.GRID, "show": "{both_ms}"} | where)


def test_every_raw_file_is_read_by_a_table_or_named_where_its_figure_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    read, results = set[str](), measured.results
    monkeypatch.setattr(measured, "results", lambda name: read.add(f"2026-{name}") or results(name))
    for tables in (*measured.PAGES.values(), *paper.PAGES.values()):
        for make in tables.values():
            make()
    readers = [
        ROOT / "README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/*.py"),
        *ROOT.glob("tests/**/*.py"),
        *ROOT.glob("dfa_megatron/plan/**/*.py"),
    ]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in readers if path != Path(__file__))
    files = [path for path in measured.RESULTS.iterdir() if path.name != "README.md"]
    unused = [path.name for path in files if path.stem not in read and path.stem.removeprefix("2026-") not in texts]
    assert unused == [], "no figure is of these"


def test_the_page_of_refusals_has_every_statement_with_the_names_of_what_it_tells() -> None:
    page = (ROOT / "docs" / "refusals.md").read_text(encoding="utf-8")
    for framework in reference.FRAMEWORKS:
        lines = reference.refusals(framework)
        calls = sum(len(calls) for *_, calls in reference.statements(framework))
        assert "\n".join(lines) in page
        assert 0.8 * calls <= sum(line.startswith("- ") for line in lines) < 2 * calls
    assert "{asked}" not in page
    assert "{Starred" not in page
    for row in (
        "- mesh_param with dist_flash_attention\n",
        "- a sequence on {size} of {ranks} ranks\n",
        "- sparse_gradients={value} with dist_flash_attention\n",  # of a dictionary
        "- mtp_hsm={value}\n",
        "- the mixer {base.__name__} where tokens are in order\n",  # its other texts are a constant pair
    ):
        assert row in page, row
