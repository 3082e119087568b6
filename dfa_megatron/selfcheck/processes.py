"""Start the processes of a self-check's worlds, and return their ranks' recordings or failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dfa_megatron.selfcheck.case import Case
from dfa_megatron.selfcheck.record import Recording, load

_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass(frozen=True, slots=True)
class World:
    """The processes of one run."""

    name: str
    ranks: int
    whole: bool
    sections: tuple[str, ...]
    before: tuple[str, ...] = ()
    """`module:function` of what each rank calls first; for tests that plant a fault."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank that failed."""

    rank: int
    kind: str
    """The name of the exception's class; "died" or "silent" for a process that raised nothing."""
    text: str
    """The traceback, or the stacks of a process that was still running."""

    @property
    def said(self) -> str:
        """Return the rank's failure in words, with the exception or the stacks."""
        return f"rank {self.rank} {self.text if self.kind == 'silent' else f'ended with {self.last_line}'}"

    @property
    def last_line(self) -> str:
        """The exception itself."""
        lines = [line for line in self.text.strip().splitlines() if line and not line.startswith(" ")]
        starts = [i for i, line in enumerate(lines) if self.kind in line.split(":")[0]]
        return "\n".join(lines[starts[-1] :]) if starts else self.text


@dataclass(frozen=True, slots=True)
class Outcome:
    """Hold a world's results: recordings of the ranks that ended, failures of the others, the first one first."""

    recordings: tuple[Recording, ...]
    failures: tuple[Failure, ...]


def run(case: Case, worlds: Sequence[World]) -> dict[str, Outcome]:
    """Run the worlds one after the other, on CPU with gloo, from one process that imports everything once.

    Raises:
        RuntimeError: that process itself failed, as when the framework cannot be imported.
    """
    with tempfile.TemporaryDirectory(prefix="dfa-selfcheck-") as name:
        folder = Path(name)
        job: dict[str, Any] = {
            "path": sys.path,
            "measure": case.measure,
            "imports": case.imports,
            "settings": dict(case.settings),
            "timeout": case.seconds,
            "worlds": [asdict(world) for world in worlds],
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with (folder / "output").open("w+", encoding="utf-8") as output:
            started = subprocess.Popen(  # noqa: S603 (this interpreter, with a folder of ours)
                [sys.executable, "-W", "ignore", "-m", "dfa_megatron.selfcheck.rank_process", str(folder)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
            )
            try:
                status = started.wait()
            finally:
                if started.stdin is not None:
                    started.stdin.close()  # it ends its ranks then
                started.wait()
            output.seek(0)
            said = output.read()
        if status:
            raise RuntimeError(f"the self-check's processes could not be started:\n{said}")
        return {world.name: _outcome(folder, world) for world in worlds}


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in given.items() if name not in _OF_A_LAUNCHER}
    kept |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    paths = [path for path in sys.path if path]
    kept["PYTHONPATH"] = os.pathsep.join(paths)
    if sys.platform == "linux":
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return kept


def _outcome(folder: Path, world: World) -> Outcome:
    recordings, failures = [], []
    for rank in range(world.ranks):
        error, recorded = folder / f"{world.name}-{rank}.error", folder / f"{world.name}-{rank}.pt"
        if error.exists():
            said = json.loads(error.read_text(encoding="utf-8"))
            failures.append((said["at"], Failure(rank, said["kind"], said["text"])))
        else:
            recordings.append(load(recorded))
    # A rank that died raised nothing itself; the errors of its peers follow from that, whichever was seen first.
    failures.sort(key=lambda pair: (pair[1].kind != "died", pair[0]))
    return Outcome(tuple(recordings), tuple(failure for _, failure in failures))
