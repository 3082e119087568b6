"""Dockerfiles keep the rules that a linter does not know, and the NGC examples name what there is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = [ROOT / "containers" / name for name in ("Dockerfile", "Dockerfile.cpu")]
SCRIPTS = sorted((ROOT / "examples" / "ngc").iterdir())
PAGE = (ROOT / "docs" / "containers.md").read_text()


def instructions(path: Path) -> list[str]:
    """The instructions with their continued lines joined; no comments."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [re.sub(r"\s+", " ", line) for line in joined.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_not_root_checked_and_small(path: Path) -> None:
    steps = instructions(path)
    base = next(step for step in steps if step.startswith("ARG BASE_IMAGE="))
    tag = base.rpartition(":")[2]
    assert re.search(r"\d+\.\d+", tag), f"{base} names no version"
    assert base.removeprefix("ARG BASE_IMAGE=") in PAGE
    assert {step for step in steps if step.startswith("FROM")} <= {"FROM ${BASE_IMAGE}", "FROM ${BASE_IMAGE} AS wheel"}
    assert [step for step in steps if step.startswith("USER")] == ["USER ${USER_ID}"]
    assert not any(step.startswith(("RUN", "COPY")) for step in steps[steps.index("USER ${USER_ID}") :])
    assert any(step.startswith("HEALTHCHECK") for step in steps)
    for step in steps:
        for command in re.findall(r"pip (?:install|wheel) [^&]*", step):
            assert "--no-cache-dir" in command
        assert not step.startswith("ADD")


def test_nvidias_packages_cannot_be_replaced() -> None:
    steps = instructions(DOCKERFILES[0])
    assert sum("PIP_CONSTRAINT= " in f"{step} " for step in steps if step.startswith("ENV")) == 2, "in both stages"
    for step in steps:
        for command in re.findall(r"pip (?:install|wheel) [^&]*", step):
            assert "--no-deps" in command or "--constraint /tmp/before.txt" in command, command


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_may_be_seen(path: Path) -> None:
    allowed = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    assert "*" in allowed
    for step in instructions(path):
        if step.startswith("COPY"):
            for source in step.split()[1:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in allowed


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_names_files_and_variables_that_are_there_and_explained(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=30)  # noqa: S607 bash of the machine
    text = path.read_text()
    config = re.search(r"/opt/dfa_megatron/(configs/\S+\.args)", text)
    assert config
    assert (ROOT / config[1]).is_file()
    assert "-m dfa_megatron.launch" in text
    for variable in set(re.findall(r"\b(?:NCCL|GLOO|CUDA)_[A-Z_]+", text)):
        assert f"`{variable}" in PAGE, f"docs/containers.md does not explain {variable}"
    assert f"examples/ngc/{path.name}" in PAGE
