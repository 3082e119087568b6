"""The launcher: a script of Megatron's gets our flags; what cannot be served is refused at start."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dfa_megatron import launch
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.script import dfa_flags as script
from tests.support.workers import run_ranks

ROOT = Path(__file__).parents[2]
SPEC = ("--spec", "dfa_megatron.megatron", "get_spec")

needs_no_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None, reason="a stand-in for megatron.training would hide it"
)

# A Megatron-LM clone of 0.16, as far as the launcher looks at it.
CLONE = {
    "megatron/training/__init__.py": "",
    "megatron/training/arguments.py": """
import argparse

def add_megatron_arguments(parser):
    parser.add_argument("--spec", nargs="*", help="a bare % (as 10%) is in the help of 0.19")
    return parser

def parse_args(extra_args_provider=None):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return (extra_args_provider(parser) if extra_args_provider else parser).parse_args()
""",
    "helper_beside_the_script.py": "",
    "pretrain_gpt.py": """
import sys
import helper_beside_the_script
from megatron.training.arguments import parse_args

if __name__ == "__main__":
    ARGS = parse_args()
    sys.modules["tests.megatron.test_launch"].seen(ARGS)
""",
}

SEEN: dict[str, Any] = {}


def seen(args: argparse.Namespace) -> None:
    """Called by the script: it runs in a namespace of its own."""
    SEEN.update(args=args)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in CLONE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def run_a_script(rank: int, world_size: int, script_path: str) -> None:
    for _ in range(2):  # the second time replaces nothing
        assert launch.main([script_path, *SPEC, "--dfa-data-layout", "zigzag", "--dfa-loss-tile", "7"]) == 0
    assert (SEEN["args"].dfa_data_layout, SEEN["args"].dfa_loss_tile) == ("zigzag", 7)
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit, match="0"):
        launch.main([script_path, "--help"])
    assert "a bare % (as 10%)" in shown.getvalue()
    assert "--dfa-data-layout {contiguous,boundary,zigzag}" in shown.getvalue()


@needs_no_training
def test_a_script_of_a_clone_gets_the_flags_and_its_help_shows_them(clone: Path) -> None:
    run_ranks(1, run_a_script, str(clone / "pretrain_gpt.py"))


def refusal(rank: int, world_size: int, *argv: str) -> str:
    """What `python -m dfa_megatron.launch` says, in a process that has not imported the script's packages."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert launch.main([*argv]) == 2
    return said.getvalue()


@needs_no_training
@pytest.mark.parametrize("lacks", ["megatron.training", "no_such_package_of_megatrons"])
def test_a_megatron_without_training_or_what_that_needs_is_one_clear_line(lacks: str, clone: Path) -> None:
    (clone / "megatron" / "training" / "__init__.py").write_text(f"import {lacks}")
    if lacks == "megatron.training":
        shutil.rmtree(clone / "megatron")
    (said,) = run_ranks(1, refusal, str(clone / "pretrain_gpt.py"), *SPEC)
    assert "megatron.training.arguments.add_megatron_arguments of Megatron-Core 0." in said
    assert f"No module named '{lacks}'" in said
    assert "Traceback" not in said


def test_a_missing_script_and_no_script_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch.main([]) == 2
    assert launch.main(["--dfa-data-layout", "contiguous"]) == 2
    assert launch.main([str(tmp_path / "none.py")]) == 2
    assert f"there is no script {tmp_path / 'none.py'}" in capsys.readouterr().err
    assert launch.main(["--help"]) == 0
    assert "pretrain_gpt.py" in capsys.readouterr().out


def test_the_example_of_the_help_is_not_refused() -> None:
    _, example = (launch.__doc__ or "").rsplit("-m dfa_megatron.launch pretrain_gpt.py", maxsplit=1)
    flags = example.split("...")[0].replace("\\", " ").split()
    known = script._known(flags)
    script._check_script(known, MegatronConfig.from_args(known))
    assert MegatronConfig.from_args(known) != MegatronConfig.from_args(script._known(SPEC)), "it shows a flag of ours"


def stub(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    for name, names in modules.items():
        module = ModuleType(f"megatron.{name.replace('_', '.')}")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_megatron_without_the_replaced_names_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "9.9")
    stub(monkeypatch, training={}, training_arguments={})
    with pytest.raises(UnsupportedError, match=r"add_megatron_arguments of Megatron-Core 9\.9.*cannot import name"):
        script.prepare(SPEC)


def test_the_newest_megatron_that_is_tested_has_a_patch() -> None:
    wheel = next(line for line in (ROOT / ".ci" / "megatron_latest.sh").read_text().splitlines() if "version=" in line)
    newest = wheel.removeprefix("version=").rpartition(".")[0]
    assert max((ROOT / "patches" / "megatron-lm").glob("*.patch")).stem == f"core_v{newest}.0"


def test_our_flags_are_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, training={}, training_arguments={"add_megatron_arguments": lambda parser: parser})
    arguments = sys.modules["megatron.training.arguments"]
    script.prepare(SPEC)
    once = arguments.add_megatron_arguments  # type: ignore[attr-defined]
    script.prepare(SPEC)
    assert arguments.add_megatron_arguments is once  # type: ignore[attr-defined]
    parsed = once(argparse.ArgumentParser()).parse_args(["--dfa-schedule", "ring"])
    assert (parsed.dfa_schedule, parsed.dfa_data_layout) == ("ring", "boundary")
