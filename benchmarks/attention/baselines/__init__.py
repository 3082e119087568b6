"""Other distributed attentions, each adapted in one file with the name that --baselines takes.

A file has `methods(job)`, which raises UnsupportedError if nothing of the baseline runs here.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from benchmarks.attention.job import BASELINES, INSTALLED, Job
from benchmarks.attention.method import Method
from dfa_megatron.errors import UnsupportedError


def baseline_methods(job: Job) -> tuple[list[Method], list[str]]:
    """Return the methods of the named or the installed baselines, and the reasons why others are absent.

    Raises:
        UnsupportedError: a baseline that was named does not run here.
    """
    methods: list[Method] = []
    absent: list[str] = []
    for name in BASELINES if INSTALLED in job.baselines else job.baselines:
        try:
            methods += importlib.import_module(f"{__name__}.{name}").methods(job)
        except UnsupportedError as error:
            if INSTALLED not in job.baselines:
                raise
            absent.append(f"{error.what}: {error.why}")
    return methods, absent


def version_of(package: str) -> str:
    """Return the version of a package.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(package, "it is not installed", f"pip install {package}") from None


def need_gpus(package: str, device: str) -> None:
    """Refuse a package that is not installed, or whose kernels do not run on that type of device."""
    version_of(package)
    if device != "cuda":
        raise UnsupportedError(f"{package} on a CPU", "its kernels are CUDA", "GPUs")
