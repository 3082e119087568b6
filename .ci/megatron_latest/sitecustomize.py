"""Lets Python 3.11 without triton import the newest megatron-core: a second leg of the tests, not a promise to users.

megatron-core 0.19 declares Python 3.12 (typing.override), and imports triton at the top of a module of experts
that no test here runs.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import typing

if not hasattr(typing, "override"):
    typing.override = lambda function: function  # type: ignore[attr-defined]

if importlib.util.find_spec("triton") is None:
    kernels = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
    kernels.GLOBAL_BLOCK_SIZE = 1  # type: ignore[attr-defined]
    kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None  # type: ignore[attr-defined]
    sys.modules[kernels.__name__] = kernels
