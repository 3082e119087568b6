"""The script that looks for trainers' hooks finds a call with its arguments, and notices another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.hooks import HOOKS, main


def test_a_hook_that_is_called_otherwise_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for hook in HOOKS:
        path = tmp_path / hook.repository / hook.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"spec = it.{hook.function}({', '.join(hook.arguments)})\n")
    assert main(["--from", str(tmp_path)]) == 0
    path.write_text(f"spec = {HOOKS[-1].function}(stage)\n")
    assert main(["--from", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * len(HOOKS) + ["ok"] * (len(HOOKS) - 1) + ["GONE"]
