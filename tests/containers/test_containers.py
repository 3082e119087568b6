"""Dockerfiles keep the rules that a linter does not know, and the NGC examples name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = [ROOT / "containers" / name for name in ("Dockerfile", "Dockerfile.cpu")]
EXAMPLES = sorted((ROOT / "examples" / "ngc").iterdir())
FROM = "FROM ${BASE_IMAGE}${BASE_DIGEST:+@${BASE_DIGEST}}"
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
    assert {step for step in steps if step.startswith("FROM")} <= {FROM, f"{FROM} AS wheels"}
    assert "ARG BASE_DIGEST=" in steps
    assert [step for step in steps if step.startswith("USER")] == ["USER ${USER_ID}"]
    assert not any(step.startswith(("RUN", "COPY")) for step in steps[steps.index("USER ${USER_ID}") :])
    assert not any(step.startswith("HEALTHCHECK") for step in steps), "it would start a Python beside a training"
    for step in steps:
        for command in re.findall(r"pip (?:install|wheel) [^&]*", step):
            assert "--no-cache-dir" in command
            assert "--no-deps" in command, "a resolver may take what is in no lock"
            by_hash = "--require-hashes" in command or "--no-index" in command
            # Built by what came with a hash.
            ours = command.rstrip().endswith(" .") and "--no-build-isolation" in command
            torch = command.rstrip().endswith('"${TORCH_INDEX}" torch')
            assert by_hash or ours or torch, command
        assert not step.startswith("ADD")


def test_nvidias_packages_cannot_be_replaced() -> None:
    steps = instructions(DOCKERFILES[0])
    assert sum("PIP_CONSTRAINT= " in f"{step} " for step in steps if step.startswith("ENV")) == 2, "in both stages"
    assert sum("packages.py missing locks/ngc.txt" in step for step in steps) == 1
    assert sum("packages.py check /tmp/before.txt" in step for step in steps) == 1


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_may_be_seen(path: Path) -> None:
    allowed = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    assert "*" in allowed
    for step in instructions(path):
        if step.startswith("COPY"):
            for source in step.split()[1:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in allowed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_names_files_that_are_in_the_image_and_variables_that_the_page_explains(path: Path) -> None:
    text = path.read_text()
    starts = "-m dfa_megatron.launch" in text or "/opt/dfa_megatron/examples/deepspeed_transformers.py" in text
    assert starts or path.suffix == ".yaml"
    named = re.findall(r"/opt/dfa_megatron/((?:configs|examples)/\S+\.(?:args|json|py))", text)
    assert named
    for file in named:
        assert "$" in file or (ROOT / file).is_file(), file
    for variable in set(re.findall(r"\b(?:NCCL|GLOO|CUDA)_[A-Z_]+", text)):
        assert f"`{variable}" in PAGE, f"docs/containers.md does not explain {variable}"
    assert f"examples/ngc/{path.name}" in PAGE
