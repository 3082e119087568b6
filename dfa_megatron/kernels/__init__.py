"""Block kernels: the registry, the choice of one for a need, and the reasons why the others were refused."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator, Mapping

import torch

from dfa_megatron import names
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels.api import BlockKernel, Need
from dfa_megatron.names import nearest, say_once

logger = logging.getLogger(__name__)

_HOMES = {
    "flash4": ("adapters.flash4", "Flash4Kernel"),
    "cudnn": ("adapters.cudnn", "CudnnKernel"),
    "aten": ("adapters.aten", "AtenFlashKernel"),
    "cpu": ("adapters.cpu", "CpuKernel"),
    "triton": ("triton.adapter", "TritonKernel"),
    "reference": ("adapters.reference", "ReferenceKernel"),
}

assert ("auto", *_HOMES) == names.KERNELS, "the kernels are not those of dfa_megatron.names"


class _Kernels(Mapping[str, BlockKernel]):
    """Kernels by name, each loaded when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, BlockKernel] = {}

    def __getitem__(self, name: str) -> BlockKernel:
        if name not in self._loaded:
            module, kind = _HOMES[name]
            self._loaded[name] = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


KERNELS: Mapping[str, BlockKernel] = _Kernels()
"""Every kernel by name, the preferred one first."""

OF_GPUS = frozenset({"flash4", "cudnn", "aten"})
"""Kernels that "auto" does not ask elsewhere."""

COMPILES_EACH_LENGTH = frozenset({"cudnn"})
"""Kernels that "auto" passes over where documents are packed: they compile a graph for each new length."""


def get(name: str) -> BlockKernel:
    """Return the kernel of that name.

    Raises:
        UnsupportedError: there is none; the nearest known name is given.
    """
    if name in KERNELS:
        return KERNELS[name]
    raise UnsupportedError(f"kernel={name!r}", "there is no such kernel", nearest(name, names.KERNELS))


def select(name: str, need: Need) -> BlockKernel:
    """Return the kernel of that name, or for "auto" the first one that does not refuse the need; logged once.

    Raises:
        UnsupportedError: the named kernel refuses (its reason, and which kernels would do), or every kernel does.
    """
    refused: dict[str, str] = {}
    for candidate in KERNELS if name == "auto" else (get(name).name,):
        why = _passed_over(candidate, need) if name == "auto" else None
        why = why or refusal(KERNELS[candidate], need)
        if why is None:
            reasons = "".join(f"; {kernel} refused: {why}" for kernel, why in refused.items())
            log = logger.warning if name == "auto" and candidate == "reference" else logger.info
            say_once(log, "kernel %s for %s%s", candidate, _describe(need), reasons)
            return KERNELS[candidate]
        refused[candidate] = why
    if name == "auto":
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in refused.items())
        raise UnsupportedError(f"attention for {_describe(need)}", reasons, "another dtype, device or head_dim")
    would_do = [other for other, kernel in KERNELS.items() if refusal(kernel, need) is None]
    instead = "kernel=" + " or ".join(map(repr, would_do)) if would_do else "no kernel as it stands"
    raise UnsupportedError(f"kernel={name!r} for {_describe(need)}", refused[name], instead)


def _passed_over(name: str, need: Need) -> str | None:
    """Return why "auto" does not ask a kernel for the need, or None."""
    if name in OF_GPUS and torch.device(need.device).type != "cuda":
        return f"it runs on CUDA, not on {need.device}"
    if need.packed and name in COMPILES_EACH_LENGTH:
        return f"it compiles every new document length, so for packs it is taken by name only (kernel={name!r})"
    return None


def refusal(kernel: BlockKernel, need: Need) -> str | None:
    """Return why a kernel cannot serve the need, or None; a softcap is checked here for all kernels."""
    if not 0 <= need.softcap < math.inf:
        return f"a softcap is positive and finite, or 0 for none, not {need.softcap}"
    if need.softcap and not kernel.caps_scores:
        return "it caps no scores"
    if need.invariant and kernel.leaves(need) is None:
        return "the bits of its results depend on the shapes and the company of a call"
    return kernel.refusal(need)


def _describe(need: Need) -> str:
    head_dim = f"head_dim {need.head_dim}" + (f" and {need.head_dim_v}" if need.head_dim_v != need.head_dim else "")
    forms = "+".join(form for form in ("full", "causal", "band") if form in need.forms)
    capability = "" if need.capability is None else " {}.{}".format(*need.capability)
    heads = f"{need.heads} heads" + (f" on {need.kv_heads}" if need.kv_heads != need.heads else "")
    dtype = str(need.dtype).removeprefix("torch.")
    deterministic = ", deterministic" if need.deterministic else ""
    softcap = f", softcap {need.softcap:g}" if need.softcap else ""
    packed = ", packed" if need.packed else ""
    more = f"{packed}{softcap}{deterministic}{', the same bits in any company' if need.invariant else ''}"
    return f"{dtype} on {need.device}{capability}, {heads}, {head_dim}, {forms} blocks{more}"
