"""The locks hold what is installed, by hash, and agree with pyproject.toml and constraints.txt."""

from __future__ import annotations

import re
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
