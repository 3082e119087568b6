"""Other distributed attentions, each adapted in one file with the name that --peers takes.

A file has `methods(job)`, which raises UnsupportedError if nothing of the peer runs here.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from benchmarks.attention.job import INSTALLED, PEERS, Job, Problem
from benchmarks.attention.method import Method
from dfa_megatron.errors import UnsupportedError


def peer_methods(job: Job) -> tuple[list[Method], list[str]]:
    """The methods of the peers that the job names, or of all that are installed; and why the others are not there.

    Raises:
        UnsupportedError: a peer that was named does not run here.
    """
    methods: list[Method] = []
    absent: list[str] = []
    for name in PEERS if INSTALLED in job.peers else job.peers:
        try:
            methods += importlib.import_module(f"{__name__}.{name}").methods(job)
        except UnsupportedError as error:
            if INSTALLED not in job.peers:
                raise
            absent.append(f"{error.what}: {error.why}")
    return methods, absent


def version_of(package: str) -> str:
    """Its version.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(package, "it is not installed", f"pip install {package}") from None


def refuse_windows(problem: Problem, who: str) -> None:
    """For methods that split no window.

    Raises:
        UnsupportedError: the mask is a window.
    """
    if problem.mask == "window":
        raise UnsupportedError(f"{who} of a sliding window", "it does not split one", "masks causal and full")
