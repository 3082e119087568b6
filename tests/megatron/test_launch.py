"""The launcher: a script of Megatron's gets our flags; what cannot be served is refused at start."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dfa_megatron import launch
from dfa_megatron.config import MegatronConfig
from dfa_megatron.megatron.script import dfa_flags as script
from tests.support.arguments import assert_refused
from tests.support.workers import run_ranks

ROOT = Path(__file__).parents[2]
SPEC = ("--spec", "dfa_megatron.megatron", "get_spec")


def refusal(rank: int, world_size: int, *argv: str) -> str:
    """What `python -m dfa_megatron.launch` says, in a process that has not imported the script's packages."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert launch.main([*argv]) == 2
    return said.getvalue()


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None, reason="a stand-in for megatron.training would hide it"
)
@pytest.mark.parametrize("lacks", ["megatron.training", "no_such_package_of_megatrons"])
def test_a_megatron_without_training_or_what_that_needs_is_one_clear_line(lacks: str, tmp_path: Path) -> None:
    """A clone of Megatron-LM, as far as the launcher looks at it; test_scripts.py has a whole one."""
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('the script ran')")
    if lacks != "megatron.training":
        (tmp_path / "megatron" / "training").mkdir(parents=True)
        (tmp_path / "megatron" / "training" / "__init__.py").write_text(f"import {lacks}")
    (said,) = run_ranks(1, refusal, str(tmp_path / "pretrain_gpt.py"), *SPEC)
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
    assert_refused(r"add_megatron_arguments of Megatron-Core 9\.9.*cannot import name", script.prepare, SPEC)


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
