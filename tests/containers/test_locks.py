"""The locks hold what is installed, by hash, and agree with pyproject.toml and constraints.txt.

containers/packages.py keeps an image's packages, and says which one changed or is too old.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = {
    "ngc": ["megatron", "deepspeed", "flash4-cu13", "examples"],
    "cpu": ["megatron", "examples"],
    "dev": ["megatron", "examples", "test", "dev"],
}
EXEMPT = {"ngc": {"torch", "triton"}, "cpu": {"torch"}, "dev": {"torch"}, "build": {"torch"}, "tools": {"torch"}}
"""PyTorch is the machine's; in NVIDIA's image so is Triton."""


def entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """What a lock pins, and the hashes of each."""
    text = (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")
    whole = [entry for entry in re.split(r"\n(?=\S)", text.strip()) if not entry.startswith("#")]
    return [(Requirement(entry.partition("\\")[0]), re.findall(r"--hash=(\S+)", entry)) for entry in whole]


def requirements(name: str) -> list[Requirement]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return [Requirement(line) for extra in EXTRAS.get(name, []) for line in extras[extra]]


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("name", EXEMPT)
def test_a_lock_pins_every_package_by_hash_and_names_no_host(name: str) -> None:
    for pinned, hashes in entries(name):
        assert re.fullmatch(r"==[^*,]+", str(pinned.specifier)), pinned
        assert hashes, f"{pinned} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes)
        assert canonicalize_name(pinned.name) not in EXEMPT[name]
    assert "://" not in (ROOT / "locks" / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_holds_what_its_extras_require(name: str) -> None:
    pinned: dict[str, set[str]] = {}
    for entry, _ in entries(name):
        pinned.setdefault(canonicalize_name(entry.name), set()).add(next(iter(entry.specifier)).version)
    for wanted in requirements(name):
        if (package := canonicalize_name(wanted.name)) not in EXEMPT[name]:
            versions = pinned.get(package, set())
            fits = [version for version in versions if wanted.specifier.contains(version, prereleases=True)]
            assert fits, f"run locks/update.sh: {name} has {versions or 'nothing'} for {wanted}"


@pytest.mark.parametrize("name", EXEMPT)
def test_a_lock_has_the_versions_of_the_constraints(name: str) -> None:
    allowed: dict[str, set[str]] = {}
    for line in constraints():
        allowed.setdefault(canonicalize_name(line.name), set()).add(str(line.specifier))
    for pinned, _ in entries(name):
        if (package := canonicalize_name(pinned.name)) in allowed:
            assert str(pinned.specifier) in allowed[package], f"run locks/update.sh: {name} has {pinned}"


SCRIPT = Path(__file__).parents[2] / "containers" / "packages.py"
LOCK = """# comment
first==2.0 \\
    --hash=sha256:aa
second==1.0 ; python_version >= "3" \\
    --hash=sha256:bb
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of packages: ours needs first>=2 and, with an extra, absent; first is NVIDIA's build of 2.1."""
    for name, version, needs in (
        ("ours", "1.0", ["first>=2", 'absent>=1; extra == "more"', 'never; python_version < "3"']),
        ("First", "2.1a0+nv26", ["gone>=1"]),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(image: Path, *args: str, replace: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(image), "REPLACE": replace}
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_what_the_image_has_is_left_out_of_the_lock_with_its_hashes(image: Path) -> None:
    lock = image / "lock.txt"
    lock.write_text(LOCK)
    done = run(image, "missing", str(lock))
    assert done.stdout == 'second==1.0 ; python_version >= "3" \\\n    --hash=sha256:bb\n'
    assert "first==2.0" in run(image, "missing", str(lock), replace="first").stdout


@pytest.mark.parametrize(
    ("before", "root", "replace", "says"),
    [
        ("First==2.1a0+nv26\n", "ours", "", ""),
        ("First==2.1a0+nv26\n", "ours[more]", "", "ours needs absent>=1, and here is None"),
        ("First==2.0\n", "ours", "", "first 2.0 of the image would become 2.1a0+nv26"),
        # first came with ours: what it needs is ours to bring
        ("", "ours", "", "first needs gone>=1, and here is None"),
        ("First==2.0\n", "ours", "first", "first needs gone>=1, and here is None"),
        ("lost==1.0\nFirst==2.1a0+nv26\n", "ours", "", "lost 1.0 of the image would become None"),
    ],
)
def test_a_change_or_a_requirement_that_is_not_met_fails_the_build(
    image: Path, before: str, root: str, replace: str, says: str
) -> None:
    (image / "before.txt").write_text(before)
    done = run(image, "check", str(image / "before.txt"), root, replace=replace)
    assert done.returncode == bool(says), done.stderr
    assert says in done.stderr
    assert ("would become" in done.stderr) == ("would become" in says)
