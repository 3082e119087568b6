"""The patches are diffs that git takes, they fit a release that is installed, and the names they import exist."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).parents[1] / "patches").glob("*/*.patch"))
each_patch = pytest.mark.parametrize("patch", PATCHES, ids=[f"{patch.parent.name}-{patch.stem}" for patch in PATCHES])


def git_apply(patch: Path, folder: Path, *options: str) -> None:
    git = shutil.which("git")
    assert git is not None
    subprocess.run([git, "apply", *options, str(patch)], cwd=folder, check=True, capture_output=True)


@each_patch
def test_git_reads_every_patch_and_every_name_that_it_imports_exists(patch: Path, tmp_path: Path) -> None:
    git_apply(patch, tmp_path, "--numstat")
    if patch.parent.name == "megatron-lm":
        pytest.importorskip("megatron.core")
    imports = re.findall(r"^\+\s*(from dfa_megatron.* import .*)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    assert imports
    for line in imports:
        exec(compile(line, patch.name, "exec"), {})  # noqa: S102 (lines of our own)


def test_a_patch_goes_into_the_installed_deepspeed_and_out_again(tmp_path: Path) -> None:
    installed = pytest.importorskip("deepspeed")
    patch = PATCHES[0].parents[1] / "deepspeed" / f"v{importlib.metadata.version('deepspeed')}.patch"
    if not patch.exists():
        pytest.skip("there is no patch for the installed version")
    name = re.findall(r"^--- a/(.*)$", patch.read_text(encoding="utf-8"), re.MULTILINE)[0]
    source = Path(installed.__file__).parents[1] / name
    copy = tmp_path / name
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    git_apply(patch, tmp_path)
    assert "dfa_megatron" in copy.read_text(encoding="utf-8")
    git_apply(patch, tmp_path, "--reverse")
    assert copy.read_bytes() == source.read_bytes()
