"""The table of tested releases: what is newer is warned of at set-up, and files and pages say what it says."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from dfa_megatron.cli.main import main
from dfa_megatron.runtime import environment, prepare
from dfa_megatron.runtime.environment import TESTED, installed, order_of, span
from tests.support import models
from tests.support.workers import run_ranks

ROOT = Path(__file__).parents[2]
USES = {"function": "torch", "megatron": "megatron.core", "huggingface": "transformers", "deepspeed": "deepspeed"}
NAMES = {"PyTorch": "torch", "Megatron-Core": "megatron-core", "DeepSpeed": "deepspeed", "TRL": "trl", "PEFT": "peft"}


def test_versions_sort_as_pip_sorts_them() -> None:
    draw = random.Random(0)
    ends = ["", "", "+cpu", "+git1a2b", "b3", "b36", "rc1"]
    drawn = [f"{draw.randint(0, 1)}.{draw.randint(8, 11)}.{draw.randint(0, 2)}{draw.choice(ends)}" for _ in range(400)]
    for first, second in pairwise(drawn):
        one, other = (Version(version.split("+")[0]) for version in (first, second))
        assert (order_of(first) > order_of(second)) == (one > other), (first, second)


def set_up_once(framework: str, ranks: int, tokens: int) -> None:
    if framework == "megatron":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        from dfa_megatron.megatron import distribute_attention as distribute

        distribute(get_gpt_layer_local_spec())
    elif framework == "huggingface":
        from dfa_megatron.huggingface import distribute_attention

        distribute_attention(models.build("Llama"))
    elif framework == "deepspeed":
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
        from dfa_megatron.deepspeed import initialize

        settings = {"train_micro_batch_size_per_gpu": 1, "dist_flash_attention": {"enabled": True, "size": ranks}}
        initialize(model=models.build("Llama"), config=settings)
    else:
        from dfa_megatron import dist_flash_attn_func

        q = torch.ones(1, tokens, 2, 16)
        dist_flash_attn_func(q, q, q, causal=True)


def set_up(rank: int, ranks: int, framework: str) -> None:
    """Set up twice where one other version of some packages was tested, as if each time were a process's first."""
    said: list[str] = []
    environment.logger.addFilter(lambda record: bool(said.append(record.getMessage())))
    own = USES[framework].replace(".", "-")
    for untested in ({own: "0"}, {own: "99", "torch": "0", "flash-attn-4": "0"}, dict[str, str]()):
        environment.TESTED = {  # type: ignore[misc]
            name: (untested[name],) * 2 if name in untested else ("0", "99") for name in TESTED
        }
        environment._read.clear()
        prepare._SAID.clear()
        said.clear()
        for _ in range(2):
            set_up_once(framework, ranks, 8 + len(untested))  # a call that was prepared before tells nothing
        there = [name for name in TESTED if name in untested and installed(name)]
        assert said == [f"{name} {installed(name)} is not what was tested: {untested[name]}" for name in there]
        assert len(said) >= len(untested) - 1


@pytest.mark.parametrize("framework", USES)
def test_a_newer_or_older_release_is_warned_of_once_at_set_up(framework: str) -> None:
    if importlib.util.find_spec(USES[framework].split(".")[0]) is None:
        pytest.skip(f"{framework} is not installed")
    run_ranks(1, set_up, framework)


def test_the_doctor_says_beside_each_version_what_was_tested(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "cpu", "--kernel", "reference", "--seq-length", "8", "--no-call"])
    said = " ".join(capsys.readouterr().out.split())
    there = {name: version for name in TESTED if (version := installed(name))}
    assert "torch" in there
    assert [name for name in there if not re.search(rf"{name} [^,]+ \(tested: {span(name)}\)", said)] == []


def test_requirements_begin_with_the_oldest_and_have_no_upper_end() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    named = [each for each in map(Requirement, lines) if each.name in TESTED]
    assert {each.name for each in named} == TESTED.keys() - {"peft", "trl"}
    for each in named:
        (end,) = each.specifier
        assert (end.operator, Version(end.version)) == (">=", Version(TESTED[each.name][0])), each


def test_what_the_gate_installs_was_tested() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [re.split("==|;", line)[:2] for line in lines if re.split("==", line)[0] in TESTED]
    assert {name for name, _ in pinned} == TESTED.keys()
    for name, version in pinned:
        assert order_of(TESTED[name][0]) <= order_of(version) <= order_of(TESTED[name][1]), name


def test_the_pages_name_the_releases_of_the_table() -> None:
    said = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        pattern = rf"({'|'.join([*NAMES, *TESTED])})[ \n](\d[\d.]*\d) (to|and) (\d[\d.]*\d)"
        for name, first, _, last in re.findall(pattern, text, re.IGNORECASE):
            ends = TESTED[NAMES.get(name, name)]
            said += [(page.name, name, first, last)] * (not all(map(str.startswith, ends, (first, last))))
    assert said == []
