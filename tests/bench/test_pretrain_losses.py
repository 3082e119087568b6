"""Losses of a pretraining script's runs are read, compared and written, whatever a run does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
steps = int(sys.argv[sys.argv.index("--train-iters") + 1])
for step in range(1, steps + 1):
    away = 0.001 if "--spec" in sys.argv else 0.5 if "--context-parallel-size" not in sys.argv else 0.0
    pace = f"elapsed time per iteration (ms): {100 / step:.1f}"
    print(f" [now] iteration {step:8}/{steps:8} | {pace} | lm loss: {11 - step + away:.6E} | norm: 1.0 |")
if "--dfa-prove" in sys.argv:
    print("prove: GPTModel\\n\\n2 ranks compute what one rank computes; it took 1.0 s\\nmore")
sys.exit(3 if "--dfa-loss-tile" in sys.argv and "--dfa-prove" not in sys.argv else 0)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from benchmarks import pretrain_losses

    made = pretrain_losses.command

    def alone(args: Any, name: str) -> list[str]:
        words = made(args, name)
        return [sys.executable, *words[words.index(str(args.scripts / "pretrain_gpt.py")) :]]

    monkeypatch.setattr(pretrain_losses, "command", alone)
    monkeypatch.setattr(pretrain_losses, "transformer_engine", lambda: False)
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    return pretrain_losses


def test_each_run_is_compared_with_one_rank_and_written_with_its_failure(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "losses.json"
    words = ["--scripts", str(tmp_path), "--out", str(out), "--train-iters", "3", "--runs"]
    assert script.main([*words, "own-1", "flags"]) == 0
    assert script.main([*words, "own-1", "own-tp", "own-cp", "flags", "launcher", "before", "prove-cp"]) == 1
    own, tensor, ring, flags, launcher, before, proved = json.loads(out.read_text())["runs"]
    assert own["losses"] == [10.0, 9.0, 8.0]
    assert own["ms_per_step"] == pytest.approx((50.0 + 33.3) / 2), "of the later half"
    assert "failed" not in own | tensor | flags
    assert "cannot" in ring
    assert before["cannot"] == "no --before"
    assert proved["proof"] == ["prove: GPTModel", "", "2 ranks compute what one rank computes; it took 1.0 s"]
    assert launcher["failed"] == "exit status 3, see losses.launcher.log"
    assert "largest_difference" not in tensor, "its ranks draw other weights"
    assert flags["largest_difference"] == pytest.approx(0.001)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["3", "8.00000", "8.50000", *["8.00100"] * 3]


def test_a_folder_without_the_script_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        script.main(["--scripts", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x.json")])
