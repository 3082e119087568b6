"""The launcher: a script of Megatron's gets our flags and our slicing; what cannot be served is refused at start."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dfa_megatron import launch
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron import versions
from dfa_megatron.megatron.selfcheck.model import DenseAttention
from dfa_megatron.megatron.start import script
from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness

ROOT = Path(__file__).parents[2]
SPEC = ("--spec", "dfa_megatron.megatron", "get_spec")

needs_no_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is not None, reason="a stand-in for megatron.training would hide it"
)

# A Megatron-LM clone of 0.16, as far as the launcher looks at it: its scripts take the slicing from training.utils.
CLONE = {
    "megatron/training/__init__.py": "",
    "megatron/training/utils.py": "from megatron.core.utils import get_batch_on_this_cp_rank",
    "megatron/training/arguments.py": """
import argparse
import megatron.training.utils

def add_megatron_arguments(parser):
    parser.add_argument("--spec", nargs="*", help="a bare % (as 10%) is in the help of 0.18 and 0.19")
    return parser

def parse_args(extra_args_provider=None):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return (extra_args_provider(parser) if extra_args_provider else parser).parse_args()
""",
    "helper_beside_the_script.py": "from megatron.training.utils import get_batch_on_this_cp_rank",
    "pretrain_gpt.py": """
import sys
from helper_beside_the_script import get_batch_on_this_cp_rank
from megatron.training.arguments import parse_args

if __name__ == "__main__":
    ARGS = parse_args()
    sys.modules["tests.megatron.test_launch"].seen(ARGS, get_batch_on_this_cp_rank)
""",
}

SEEN: dict[str, Any] = {}


def seen(args: argparse.Namespace, slicing: Any) -> None:
    """Called by the script: it runs in a namespace of its own."""
    SEEN.update(args=args, slicing=slicing)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in CLONE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def build_a_teacher() -> Any:
    """A model whose attention is not of this package, and would take its tokens for Megatron's zigzag order."""
    config = harness.make_config(harness.Topology(cp=2), harness.MEGATRONS)
    spec = harness.megatrons_spec(config)
    spec.submodules.self_attention.submodules.core_attention = DenseAttention
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(config, spec, harness.VOCABULARY, harness.SEQUENCE)


def check_teacher(layout: str) -> None:
    if layout == "contiguous":
        with pytest.raises(
            UnsupportedError, match=r"beside --dfa-data-layout contiguous.*teacher.*distribute_attention for the spec"
        ):
            build_a_teacher()
    else:
        build_a_teacher()


def slice_through_a_script(rank: int, world_size: int, script_path: str, layout: str) -> None:
    harness.start(harness.Topology(cp=2))
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from dfa_megatron.megatron import DistributedAttentionLayer, distribute_attention  # noqa: F401
    from dfa_megatron.megatron.tokens.batch import check_declared

    for _ in range(2):  # the second time replaces nothing
        assert launch.main([script_path, *SPEC, "--dfa-data-layout", layout, "--dfa-schedule", "ring"]) == 0
    assert (SEEN["args"].dfa_data_layout, SEEN["args"].dfa_schedule) == (layout, "ring")
    whole = {"tokens": torch.arange(16).view(2, 8), "labels": None}
    if layout == "contiguous":
        with pytest.raises(UnsupportedError, match="a model without distributed attention"):
            SEEN["slicing"](dict(whole))
    check_teacher(layout)
    distribute_attention(get_gpt_layer_local_spec())
    batch = SEEN["slicing"](dict(whole))
    places = {"contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]], "boundary": [[0, 1, 6, 7], [2, 3, 4, 5]]}[layout][rank]
    assert torch.equal(batch["tokens"], whole["tokens"][:, places])
    assert list(batch) == ["tokens", "labels"]
    assert batch["labels"] is None
    group = parallel_state.get_context_parallel_group()
    check_declared(group, layout, batch["tokens"].shape[1])
    assert torch.equal(SEEN["slicing"](dict(whole), cp_group=group)["tokens"], batch["tokens"])


@needs_no_training
@pytest.mark.parametrize("layout", ["contiguous", "boundary"])
def test_a_script_of_a_clone_gets_the_flags_and_the_slicing_of_its_layout(clone: Path, layout: str) -> None:
    run_ranks(2, slice_through_a_script, str(clone / "pretrain_gpt.py"), layout)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dfa_megatron.launch", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )


@needs_no_training
def test_the_help_of_a_script_shows_our_flags(clone: Path) -> None:
    done = run(str(clone / "pretrain_gpt.py"), "--help")
    assert done.returncode == 0, done.stderr
    assert "a bare % (as 10%)" in done.stdout
    assert "--dfa-data-layout {contiguous,boundary,zigzag}" in done.stdout


def refusal(rank: int, world_size: int, *argv: str) -> str:
    """What `python -m dfa_megatron.launch` says, in a process that has not imported the script's packages."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert launch.main([*argv]) == 2
    return said.getvalue()


@needs_no_training
def test_a_megatron_without_training_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("raise SystemExit('the script ran')")
    (said,) = run_ranks(1, refusal, str(tmp_path / "pretrain_gpt.py"), *SPEC)
    assert "megatron.training.arguments.add_megatron_arguments of Megatron-Core 0." in said
    assert "there is no module megatron.training" in said
    assert "Traceback" not in said


@needs_no_training
def test_what_megatrons_training_package_lacks_is_named(clone: Path) -> None:
    (clone / "megatron" / "training" / "__init__.py").write_text("import no_such_package_of_megatrons")
    (said,) = run_ranks(1, refusal, str(clone / "pretrain_gpt.py"), *SPEC)
    assert "megatron.training.arguments of Megatron-Core 0." in said
    assert "No module named 'no_such_package_of_megatrons'" in said


def test_a_missing_script_and_no_script_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert launch.main([]) == 2
    assert launch.main(["--dfa-data-layout", "contiguous"]) == 2
    assert launch.main([str(tmp_path / "none.py")]) == 2
    assert f"there is no script {tmp_path / 'none.py'}" in capsys.readouterr().err
    assert launch.main(["--help"]) == 0
    assert "pretrain_gpt.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("without --spec", ["--dfa-data-layout", "contiguous"]),
        ("without --spec", ["--spec"]),
        ("--spec local", ["--spec", "local"]),
        ("--yaml-cfg", [*SPEC, "--yaml-cfg", "a.yaml"]),
        ("--use-legacy-models", [*SPEC, "--use-legacy-models"]),
        ("--dfa-selfcheck with --spec mine", ["--spec", "mine", "--dfa-selfcheck"]),
    ],
)
def test_flags_that_would_be_silently_wrong_are_refused_before_the_script_runs(message: str, flags: list[str]) -> None:
    with pytest.raises(UnsupportedError, match=message):
        script.prepare(flags)


def stub(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    monkeypatch.setattr(TransformerLayer, "__init__", TransformerLayer.__init__)  # which the launcher replaces
    for name, names in modules.items():
        module = ModuleType(f"megatron.{name.replace('_', '.')}")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_megatron_without_the_replaced_names_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "9.9")
    stub(monkeypatch, training={}, training_arguments={})
    with pytest.raises(UnsupportedError, match=r"add_megatron_arguments of Megatron-Core 9\.9.*no such function"):
        script.prepare(SPEC)


@pytest.mark.parametrize(
    "slicing",
    [None, lambda cp_group, batch: batch, lambda batch, group=None: batch],
    ids=["none", "another order", "another name"],
)
def test_an_unknown_way_of_slicing_is_refused_for_contiguous_and_left_alone_otherwise(
    monkeypatch: pytest.MonkeyPatch, slicing: Any
) -> None:
    stub(monkeypatch, training={}, training_arguments={"add_megatron_arguments": lambda parser: parser})
    stub(monkeypatch, core_utils={"get_batch_on_this_cp_rank": slicing})
    assert script.prepare([*SPEC, "--dfa-data-layout", "zigzag"]).data_layout == "zigzag"
    assert script.prepare(SPEC).data_layout == "boundary"
    with pytest.raises(UnsupportedError, match=r"get_batch_on_this_cp_rank.*--dfa-data-layout boundary"):
        script.prepare([*SPEC, "--dfa-data-layout=contiguous"])


@pytest.mark.parametrize(
    ("found", "rank", "lines"),
    [("0.20.0", "0", 1), ("1.0", "0", 1), ("0.20.0rc0+abc", "1", 0), ("0.19.2", "0", 0), ("0.16.1", "0", 0)],
)
def test_a_megatron_that_is_newer_than_any_that_was_tried_is_said_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str, rank: str, lines: int
) -> None:
    import megatron.core

    stub(monkeypatch, training={}, training_arguments={"add_megatron_arguments": lambda parser: parser})
    monkeypatch.setattr(megatron.core, "__version__", found)
    monkeypatch.setenv("RANK", rank)
    versions.say_if_not_tried.cache_clear()
    with caplog.at_level("WARNING"):
        script.prepare(SPEC)
        script.prepare(SPEC)
    said = [record.getMessage() for record in caplog.records if "was not tried" in record.getMessage()]
    assert len(said) == lines
    assert all(f"Megatron-Core {found} was not tried: 0.16 to 0.19 are" in line for line in said)


def test_the_docs_name_the_newest_megatron_that_was_tried() -> None:
    newest = "{}.{}".format(*versions.LATEST_TRIED)
    wheel = next(line for line in (ROOT / ".ci" / "megatron_latest.sh").read_text().splitlines() if "version=" in line)
    assert wheel.startswith(f"version={newest}.")
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


def test_slicing_that_is_asked_for_in_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def megatrons(batch: Any, is_hybrid_cp: bool, cp_group: Any = None, new_in_a_later_version: int = 0) -> Any:
        raise AssertionError("Megatron's own slicing ran")

    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # which needs megatron.core.utils as it is
    stub(monkeypatch, training={}, training_arguments={"add_megatron_arguments": lambda parser: parser})
    stub(monkeypatch, core_utils={"get_batch_on_this_cp_rank": megatrons})
    script.prepare([*SPEC, "--dfa-data-layout", "contiguous"])
    slicing = sys.modules["megatron.core.utils"].get_batch_on_this_cp_rank  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="new_in_a_later_version=3"):
        slicing({}, is_hybrid_cp=False, new_in_a_later_version=3)
