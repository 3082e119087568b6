"""What the house must stay: narrow signatures, short files and functions, small folders, one meaning a file name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from dfa_megatron.config import MegatronConfig
from tests.support import house

PUBLIC = {
    "indexed/chosen.py:sparse_attn",
    "indexed/index_loss.py:index_loss",
    "indexed/topk.py:index_topk",
    "attention.py:dist_flash_attn_func",
    "attention.py:dist_flash_attn_varlen_func",
    "recurrence/functions.py:dist_conv",
    "sequence/decode.py:decode_attn_func",
    "recurrence/upstream.py:dist_mamba1",
    "recurrence/upstream.py:dist_mamba2",
    "sequence/max_logits.py:max_logits",
}

FRAMEWORKS_OWN = {
    "deepspeed/initialize.py:initialize",
    "huggingface/attention_function.py:_distributed",
    "megatron/layers/core_attention.py:__init__",
}
"""Signatures that a framework calls: theirs are ours."""

SAME_ROLE = {
    "batch.py": "the batch of a framework",
    "checkpointing.py": "rematerialization in a framework",
    "merge.py": "the kernels' merge, as PyTorch and as Triton",
}
"""File names that may stand in several folders, because each is the same thing there."""

WIDE_FOR_NOW = {"runtime/op.py:attention_backward"}
"""May only become shorter."""

BUDGETS = {
    "benchmarks": 5_835,
    "cli": 851,
    "deepspeed": 1_033,
    "docs": 1_171,
    "doctor": 918,
    "huggingface": 3_859,
    "indexed": 1_010,
    "kernels": 3_870,
    "loss": 740,
    "megatron": 3_918,
    "plan": 5_437,
    "proving": 720,
    "recurrence": 1_405,
    "remat": 485,
    "runtime": 5_193,
    "sequence": 418,
    "tests": 37_192,
    "top": 1_946,
    "trees": 315,
}
"""Lines of Python in a folder of the package, in its files beside them ("top"), in tests, docs and benchmarks.

May only fall: who must raise one says why in the same commit.
"""

ALL = (house.PACKAGE, *house.ELSEWHERE)


def ours(folders: Iterable[str] = ALL) -> list[house.Function]:
    """Functions whose signature is ours to choose; a test's stand-in for a package has that package's."""
    return [
        function
        for function in house.functions(house.ROOT, *folders)
        if not function.triton
        and function.where not in FRAMEWORKS_OWN
        and not function.where.rpartition(":")[2].startswith("_flash_attn")
    ]


def test_no_function_takes_more_than_eight_parameters_and_no_public_one_more_than_sixteen() -> None:
    wide = {function.where for function in ours() if function.parameters > (16 if function.where in PUBLIC else 8)}
    assert wide - WIDE_FOR_NOW == set()


def test_no_file_is_longer_than_400_lines() -> None:
    long = {name for name, lines in house.lines_by_file(house.ROOT, *ALL).items() if lines > 400}
    assert long == set()


def test_no_folder_holds_more_lines_than_its_budget() -> None:
    held: Counter[str] = Counter()
    for name, lines in house.lines_by_file(house.ROOT, house.PACKAGE, "benchmarks", "docs", "tests").items():
        whole, *inner = name.split("/")
        held[whole if whole != house.PACKAGE else inner[0] if len(inner) > 1 else "top"] += lines
    assert {folder: lines for folder, lines in held.items() if lines > BUDGETS.get(folder, 0)} == {}


def test_no_function_is_longer_than_50_lines() -> None:
    long = {function.where for function in ours() if function.lines > 50}
    long = {where for where in long if not (where.startswith("examples/") and where.endswith(":main"))}  # scripts
    assert long == set()


def test_no_folder_of_the_package_holds_more_than_25_modules() -> None:
    full = {name for name, count in house.modules_by_folder(house.ROOT).items() if count > 25}
    assert full == set()


def test_the_pages_hold_no_more_words_than_now() -> None:
    assert house.words_of_markdown(house.ROOT) <= 23_520


def test_no_file_name_stands_twice_but_for_the_same_thing() -> None:
    assert set(house.repeated_names(house.ROOT)) - SAME_ROLE.keys() == set()


def test_one_name_of_a_class_means_one_thing() -> None:
    assert house.repeated_classes(house.ROOT) == {}


def test_attention_loads_no_more_than_it_needs() -> None:
    """May only fall."""
    loaded = house.import_closure("dfa_megatron.attention")
    assert len(loaded) <= 59
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in loaded) <= 10_316


def test_there_are_no_more_options_than_eleven() -> None:
    assert len(fields(MegatronConfig)) <= 11


@pytest.mark.parametrize("listed", [FRAMEWORKS_OWN, PUBLIC])
def test_a_listed_function_exists(listed: set[str]) -> None:
    assert listed <= {function.where for function in house.functions(house.ROOT, house.PACKAGE)}


FACTS = {
    "kernels/tape.py": {"_ALIGNMENT"},
    "plan/language/geometry.py": {"UNBOUNDED", "FULL", "CAUSAL"},
    "plan/language/leaves.py": {"_TILES"},
    "plan/language/sizes.py": {"BYTES"},
    "plan/lowering/landings.py": {"_TENSORS", "ALIGNMENT"},
    "plan/lowering/lower.py": {"MOST_PARTS"},
    "plan/proof/set_algebra.py": {"ONE"},
}
"""Numbers of plans and launches that nobody tuned; `MEASURED` has tables, and an adapter of a kernel its own."""

MEASURED, TUNED = {"plan/cost/hardware.py", "plan/degree.py"}, "plan/language/work.py"


def numbers_of(path: Path) -> dict[str, str]:
    """Return the names that a file gives to numbers, and what it says behind each."""
    found = {}
    for node, behind in pairwise([*ast.parse(path.read_text(encoding="utf-8")).body, ast.Pass()]):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            inside = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            if {int, float} & {*map(type, inside)}:
                names = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                found |= dict.fromkeys(names.strip("()").split(", "), ast.unparse(behind).replace("\\n", " "))
    return found


def test_at_most_fifteen_numbers_are_tuned_and_each_says_by_what() -> None:
    package = house.ROOT / house.PACKAGE
    for path in (*package.glob("plan/**/*.py"), *package.glob("kernels/*.py")):
        if (name := path.relative_to(package).as_posix()) not in {TUNED, *MEASURED}:
            assert numbers_of(path).keys() == FACTS.get(name, set()), name
    tuned = numbers_of(package / TUNED)
    assert len(tuned) <= 15
    assert [name for name, said in tuned.items() if len(said) < 60] == []
    named = re.findall(r"([\w.-]+\.json)", " ".join(tuned.values()))
    assert len(named) > 5
    assert [file for file in named if not (house.ROOT / "benchmarks/results" / file).is_file()] == []


WORKFLOWS = {
    "ci.yml": ([".ci/run"], []),
    "docs.yml": (["make docs"], ["pages: write", "id-token: write"]),
    "frameworks.yml": ([".ci/contracts.sh frameworks", ".ci/automodel.sh", "python -m tests.contracts $CONTRACTS"], []),
    "release.yml": (
        [".ci/release.sh dist", 'pipx run --spec "uv>=0.8,<1" uv publish --trusted-publishing always dist/*'],
        ["id-token: write"],
    ),
}
"""What each runs, and what one of its jobs may do but read: nothing, or publish without a secret."""


FILES = {file.name for file in (house.ROOT / ".github" / "workflows").iterdir()}


@pytest.mark.parametrize("name", sorted(FILES | WORKFLOWS.keys()))
def test_workflows_run_their_commands_with_actions_pinned_by_commit_and_may_write_only_to_publish(name: str) -> None:
    text = (house.ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    commands, writes = WORKFLOWS[name]
    assert len(used) >= 2
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert re.findall(r"run: (.*)", text) == commands
    assert "\npermissions:\n  contents: read\njobs:" in text or "\npermissions:\n  contents: read\nconcurrency:" in text
    assert text.count("permissions:") == 1 + bool(writes)
    assert re.findall(r"[\w-]+: write", text) == writes


def test_the_core_keeps_no_more_than_25_caches() -> None:
    package = house.ROOT / house.PACKAGE
    rooms = [
        *package.glob("*.py"),
        *(path for room in ("plan", "kernels", "runtime", "remat") for path in (package / room).rglob("*.py")),
    ]
    kept = re.findall(r"lru_cache\(|functools\.cache\b|@cache\b|@kept_on_mask", " ".join(map(Path.read_text, rooms)))
    assert len(kept) <= 25
