"""The names that options, flags, JSON and documentation share, and what is said once; free of PyTorch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from functools import lru_cache
from operator import is_
from typing import Any

SCHEDULES = ("auto", "ring", "balanced", "balanced_shared", "greedy")
OWNER_COMPUTES = "owner_computes"
"""The schedule of plans in which every rank computes its own rows because its layout shares out the work."""

LAYOUTS = ("contiguous", "zigzag", "load_balanced")
"""Which tokens a rank holds, as the functions take it."""

DATA_LAYOUTS = ("contiguous", "boundary", "zigzag")
"""Which tokens a framework's batches bring to a rank."""

KERNELS = ("auto", "flash4", "cudnn", "aten", "cpu", "triton", "reference")
"""In the order in which "auto" prefers them."""

TRANSPORTS = ("auto", "p2p", "copy_engine")
CHECKPOINT = ("auto", "none", "full", "remat")
VERIFY = ("on", "off")
NUMERICS = ("fastest", "invariant")

ZIGZAG_ELSEWHERE = ("zigzag", "head_tail", "head-tail", "headtail", "striped", "stripe")
"""What others call layouts that balance a causal mask by moving tokens."""


@lru_cache(maxsize=256)
def say_once(log: Callable[..., object], *said: object) -> None:
    """Call a logger's method once a process for equal arguments, however many layers bring them."""
    log(*said)


def plain(value: Any, *packages: str) -> Any:
    """Return a number, a boolean or an array of numpy, and of these packages, as Python's own, in lists too."""
    if type(value) in (list, tuple):
        own = [plain(one, *packages) for one in value]
        return value if all(map(is_, own, value)) else type(value)(own)
    return value.tolist() if type(value).__module__ in ("numpy", *packages) and hasattr(value, "tolist") else value


def nearest(value: object, known: Collection[str]) -> str:
    """Return a hint for an unknown name: the most similar known one, and all of them."""
    if value in ZIGZAG_ELSEWHERE and known is SCHEDULES:
        return "the layout: layout='zigzag' of the functions, data_layout='zigzag' in Megatron, `plan --layout zigzag`"
    if value in ZIGZAG_ELSEWHERE and "zigzag" in known:
        return "'zigzag', which balances a causal mask in this way"
    close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.4)
    return (f"perhaps {close[0]!r}; " if close else "") + "one of " + ", ".join(known)
