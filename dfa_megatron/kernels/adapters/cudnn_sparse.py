"""NVIDIA's kernels of learned-sparse attention, of nvidia-cudnn-frontend: the best scores, and gradients of latents.

On an H200 these gradients take a fifth of the time of Triton's. Where they do not compute, Triton or PyTorch does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import math
from typing import Any

import torch

OLDEST = (1, 32)
TOPK = 2048
"""The most keys of a row that its choice of the best takes."""

log = logging.getLogger(__name__)


@functools.cache
def _operators() -> Any:
    """Return the package's operators; None where it is not installed, or cannot be used, which is logged."""
    if importlib.util.find_spec("cudnn") is None:
        return None
    version = "?"
    try:
        version = importlib.metadata.version("nvidia-cudnn-frontend")
        if tuple(int(part) for part in version.split(".")[:2]) >= OLDEST:
            operators = importlib.import_module("cudnn").DSA
            for name in ("indexer_top_k_wrapper", "sparse_attention_backward_wrapper"):
                getattr(operators, name)
            return operators
        why = f"it is older than {OLDEST[0]}.{OLDEST[1]}"
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # of a compiler that it imports, too
        why = f"{type(error).__name__}: {error}"
    log.warning("indexed attention runs without the kernels of nvidia-cudnn-frontend %s: %s", version, why)
    return None


def serves(x: torch.Tensor) -> bool:
    """Return whether the kernels were seen to be right on the device of x: Hopper."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0) and _operators() is not None


def best_places(scores: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return the places of each row's `count` highest scores, int64, in any order; None where it does not serve.

    Of equal scores the lowest places are taken. scores: float32 (rows, keys), without -0.
    """
    if not (0 < count <= min(TOPK, scores.shape[1]) and len(scores) and serves(scores)):
        return None
    lengths = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    found = _operators().indexer_top_k_wrapper(scores, lengths, count, tie_break=1, return_val=False)
    places: torch.Tensor = found["indices"].long()
    return places


def takes(q: torch.Tensor, kv: torch.Tensor, chosen: torch.Tensor, values: tuple[int, int]) -> bool:
    """Return whether `gradients` computes those of such latents; it adds in any order."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    latent = q.dtype in (torch.bfloat16, torch.float16) and kv.shape[1:] in ((1, 576), (1, 512)) and values == (0, 512)
    return latent and q.shape[1] > 1 and 0 not in (len(q), len(kv), chosen.shape[1]) and serves(q)


def gradients(
    dout: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq and dkv in q's dtype, of what `indexed.chosen.gradients` takes.

    A row that sees nothing has an lse of -inf; any other number keeps its probabilities at 0.
    """
    (q, kv, chosen), (out, lse) = inputs, results
    chosen = torch.nn.functional.pad(chosen.int(), (0, -chosen.shape[1] % 64), value=-1)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    none = lse.new_full((q.shape[1],), -1e30)
    found = _operators().sparse_attention_backward_wrapper(
        q, kv[:, 0], out, dout, lse, none, chosen, softmax_scale=scale
    )
    return found["dq"], found["dkv"][:, None]
