"""Patches go in whole or not at all, come out again, and fit the releases that they are named after."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "patches" / "apply.py"
CLONES = "DFA_MEGATRON_UPSTREAM"
"""A folder with one git clone per product (megatron-lm, deepspeed), with the tags that the patches are named after."""


def load() -> Any:
    spec = importlib.util.spec_from_file_location("apply", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["apply"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


apply = load()
ALL = sorted(apply.PATCHES.glob("*/*.patch"))
each_patch = pytest.mark.parametrize("patch", ALL, ids=[f"{patch.parent.name}-{patch.stem}" for patch in ALL])

FRUIT = "apple\nbanana\ncherry\ndate\nelder\nfig\ngrape\n"
DIFF = """--- a/fruit.py
+++ b/fruit.py
@@ -2,3 +2,3 @@
 banana
-cherry
+citron
 date
@@ -6,2 +6,3 @@
 fig
+gooseberry
 grape
--- a/deep/herb.py
+++ b/deep/herb.py
@@ -1,2 +1,3 @@
 basil
+chive

"""


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of two files, for which there is one patch."""
    folder = tmp_path / "patches" / "garden"
    folder.mkdir(parents=True)
    (folder / "v1.patch").write_text(DIFF)
    monkeypatch.setattr(apply, "PATCHES", tmp_path / "patches")
    clone = tmp_path / "clone"
    (clone / "deep").mkdir(parents=True)
    (clone / "fruit.py").write_text(FRUIT)
    (clone / "deep" / "herb.py").write_text("basil\n\n")
    return clone


def texts(clone: Path) -> dict[str, bytes]:
    return {str(path.relative_to(clone)): path.read_bytes() for path in sorted(clone.rglob("*")) if path.is_file()}


def test_a_patch_goes_in_once_and_comes_out_again(product: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = texts(product)
    (product / "fruit.py").chmod(0o755)
    assert apply.main(["garden", str(product), "--check"]) == 0
    assert "garden/v1.patch fits" in capsys.readouterr().out
    assert texts(product) == before
    assert apply.main(["garden", str(product)]) == 0
    after = texts(product)
    assert after["fruit.py"] == b"apple\nbanana\ncitron\ndate\nelder\nfig\ngooseberry\ngrape\n"
    assert after["deep/herb.py"] == b"basil\nchive\n\n"
    assert (product / "fruit.py").stat().st_mode & 0o777 == 0o755
    capsys.readouterr()
    assert apply.main(["garden", str(product)]) == 0
    assert "already in" in capsys.readouterr().out
    assert texts(product) == after
    assert apply.main(["garden", str(product), "--reverse"]) == 0
    assert texts(product) == before
    assert apply.main(["garden", str(product), "--reverse"]) == 0
    assert "not in" in capsys.readouterr().out
    assert texts(product) == before


def test_lines_that_have_moved_are_found_where_they_are_alone(product: Path) -> None:
    moved = "new\nnew\n" + FRUIT
    (product / "fruit.py").write_text(moved)
    assert apply.main(["garden", str(product)]) == 0
    assert "new\nnew\napple\nbanana\ncitron\n" in (product / "fruit.py").read_text()
    assert apply.main(["garden", str(product), "--reverse"]) == 0
    assert (product / "fruit.py").read_text() == moved


@pytest.mark.parametrize(
    ("fruit", "message"),
    [
        (FRUIT.replace("fig", "melon"), r"hunk 2 (fruit.py, near line 6) does not fit. It looks for"),
        ("new\n" + FRUIT + FRUIT, r"hunk 1 (fruit.py, near line 2) does not fit"),  # at two places
        (FRUIT.replace("cherry", "citron"), r"hunk 1 (fruit.py, near line 2) is in already, while hunk 2"),
        ("", r"hunk 1 (fruit.py, near line 2) does not fit"),
    ],
    ids=["another text", "two places", "half of it in", "no lines"],
)
def test_what_does_not_fit_is_shown_and_nothing_is_written(
    product: Path, capsys: pytest.CaptureFixture[str], fruit: str, message: str
) -> None:
    (product / "fruit.py").write_text(fruit)
    before = texts(product)
    for action in ([], ["--check"], ["--reverse"]):
        assert apply.main(["garden", str(product), *action]) == 1
        assert message in capsys.readouterr().err
    assert texts(product) == before


def test_a_failure_while_writing_leaves_every_file_as_it_was(product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = texts(product)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(apply.shutil, "copymode", full)
    assert apply.main(["garden", str(product)]) == 1
    assert texts(product) == before


@pytest.mark.parametrize(
    "text",
    [
        "nothing of a diff\n",
        DIFF.replace("b/deep/herb.py", "b/../herb.py"),
        DIFF.replace("b/deep/herb.py", "/etc/herb.py"),
        DIFF.replace("b/deep/herb.py", "/dev/null"),
        DIFF.replace("@@ -2,3 +2,3 @@", "@@ -2,4 +2,4 @@"),
        "--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+new\n",
    ],
    ids=["no diff", "upwards", "absolute", "removal", "too short", "addition"],
)
def test_what_is_no_change_of_files_in_the_clone_is_refused(product: Path, text: str) -> None:
    (apply.PATCHES / "garden" / "v1.patch").write_text(text)
    assert apply.main(["garden", str(product)]) == 1


def test_of_two_releases_whose_lines_are_the_same_the_one_with_the_right_places_is_taken(product: Path) -> None:
    shifted = DIFF.replace("-2,3 +2,3", "-3,3 +3,3").replace("-6,2 +6,3", "-7,2 +7,3")
    (apply.PATCHES / "garden" / "v0.patch").write_text(shifted)
    (apply.PATCHES / "garden" / "v2.patch").write_text(shifted)
    assert "garden/v1.patch fits" in apply.run("garden", product, check=True)
    (product / "fruit.py").write_text("new\n" + FRUIT)
    assert "garden/v0.patch fits" in apply.run("garden", product, check=True)


def recorded(patch: Path, clone: Path) -> None:
    """Files that have just the lines that a patch looks for, where it looks for them."""
    files: dict[str, list[str]] = {}
    for hunk in apply.read_patch(patch):
        lines = files.setdefault(hunk.path, [])
        lines += [f"# filler {n}\n" for n in range(len(lines), hunk.line_before - 1)]
        lines += hunk.before
    for name, lines in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("".join(lines))


@each_patch
def test_every_patch_goes_into_the_lines_it_was_made_for_and_out_again(patch: Path, tmp_path: Path) -> None:
    recorded(patch, tmp_path)
    before = texts(tmp_path)
    assert f"{patch.name} put into" in apply.run(patch.parent.name, tmp_path)
    assert texts(tmp_path).keys() == before.keys()
    assert all(text != before[name] for name, text in texts(tmp_path).items())
    assert f"{patch.name} taken out of" in apply.run(patch.parent.name, tmp_path, reverse=True)
    assert texts(tmp_path) == before


@each_patch
def test_every_line_that_a_patch_adds_calls_a_name_that_exists(patch: Path) -> None:
    if patch.parent.name == "megatron-lm":
        pytest.importorskip("megatron.core")
    added = [line for hunk in apply.read_patch(patch) for line in set(hunk.after) - set(hunk.before)]
    imports = [line.strip() for line in added if " import " in line]
    assert imports
    for line in imports:
        exec(compile(line, patch.name, "exec"), {})  # noqa: S102 (lines of our own)


@pytest.fixture
def upstream(patch: Path, tmp_path: Path) -> Path:
    """The files that a patch changes, as they are in the release."""
    clone = Path(os.environ.get(CLONES, "")) / patch.parent.name
    if not os.environ.get(CLONES) or not clone.exists():
        pytest.skip(f"{CLONES} names no folder with a clone {patch.parent.name}")
    git = shutil.which("git")
    assert git is not None
    for name in {hunk.path for hunk in apply.read_patch(patch)}:
        shown = subprocess.run([git, "-C", str(clone), "show", f"{patch.stem}:{name}"], capture_output=True, check=True)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(shown.stdout)
    return tmp_path


@each_patch
def test_every_patch_fits_its_release_as_git_sees_it_and_leaves_python(patch: Path, upstream: Path) -> None:
    before = texts(upstream)
    theirs = upstream.parent / f"{patch.stem}-by-git"
    shutil.copytree(upstream, theirs)
    git = shutil.which("git")
    assert git is not None
    subprocess.run([git, "apply", str(patch)], cwd=theirs, check=True)
    assert f"{patch.name} put into" in apply.run(patch.parent.name, upstream)
    assert texts(upstream) == texts(theirs)
    for name in before:
        py_compile.compile(str(upstream / name), doraise=True, cfile=str(upstream.parent / "compiled"))
    apply.run(patch.parent.name, upstream, reverse=True)
    assert texts(upstream) == before
