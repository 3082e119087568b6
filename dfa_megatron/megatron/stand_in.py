"""Let Megatron-Core train on CPU with gloo (tests, quick start) by replacing its CUDA calls.

    from dfa_megatron.megatron.stand_in import use_cpu
    use_cpu()          # before the first model is built; refuses where CUDA is available

Every patch is a function below whose docstring names the Megatron-Core code that needs it (versions 0.16.1 and 0.19.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from dfa_megatron.errors import UnsupportedError

_MARK = "_dfa_megatron_cpu"
"""Set on torch.cuda once the patches are in, so that a second call changes nothing."""


def use_cpu() -> None:
    """Apply every patch to this process, once.

    Raises:
        UnsupportedError: CUDA is available, so the patches would be wrong.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            "use_cpu on a machine with CUDA", "Megatron's own CUDA calls work there", "leaving use_cpu out"
        )
    if getattr(torch.cuda, _MARK, False):
        return
    devices = (_current_device, _moves_to_cuda, _literal_cuda_devices, _tensor_types)
    for patch in (*devices, _generators, _synchronize, _streams, _experts):
        patch()
    _put(torch.cuda, _MARK, True)


def _put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _current_device() -> None:
    """megatron/core/utils.py (GlobalMemoryBuffer), rotary_pos_embedding.py, mappings.py, p2p_communication.py."""
    _put(torch.cuda, "current_device", lambda: torch.device("cpu"))


def _generators() -> None:
    """megatron/core/tensor_parallel/random.py: the CUDA generator's state becomes the CPU generator's.

    The tracker of random states works as on a GPU, also for dropout under checkpoints and tensor parallelism.
    """
    from megatron.core.tensor_parallel import random

    _put(torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state())
    _put(torch.cuda, "set_rng_state", lambda state, device="cuda": torch.set_rng_state(state))
    _put(torch.cuda, "manual_seed", torch.manual_seed)
    _put(random, "_get_cuda_rng_state", lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state())
    _put(random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state))


def _moves_to_cuda() -> None:
    """megatron/core/models/common/embeddings/rope_utils.py (get_pos_emb_on_this_cp_rank moves its index to CUDA)."""
    _put(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def _literal_cuda_devices() -> None:
    """Literal device="cuda" and pin_memory=True: schedules.py (token counts), transformer/utils.py, rope_utils.py."""

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        _put(torch, name, on_cpu(getattr(torch, name)))


def _tensor_types() -> None:
    """megatron/core/optimizer/clip_grads.py asserts that a gradient's `.type()` is "torch.cuda.FloatTensor"."""
    real = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return real(self, dtype, *args, **kwargs)
        return str(real(self)).replace("torch.", "torch.cuda.", 1)

    _put(torch.Tensor, "type", type_name)


def _synchronize() -> None:
    """megatron/core/pipeline_parallel/p2p_communication.py (batch_p2p_sync) waits for the device."""
    _put(torch.cuda, "synchronize", lambda *args, **kwargs: None)
    _put(torch.cuda, "empty_cache", lambda: None)


def _streams() -> None:
    """megatron/core/distributed (gradient reduction) and the MoE dispatchers make CUDA streams and events.

    pipeline_parallel/utils.py (the parts of a schedule plan) marks ranges for a profiler.
    """

    class Stream:
        """Replace a CUDA stream; the CPU runs in order, so waiting and recording do nothing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return self

        def query(self) -> bool:
            return True

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None

    _put(torch.cuda.nvtx, "range_push", lambda message: 0)
    _put(torch.cuda.nvtx, "range_pop", lambda: 0)
    _put(torch.cuda, "Stream", Stream)
    _put(torch.cuda, "Event", Stream)
    _put(torch.cuda, "current_stream", lambda *args, **kwargs: Stream())
    _put(torch.cuda, "default_stream", lambda *args, **kwargs: Stream())
    _put(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    _put(torch.Tensor, "record_stream", lambda self, stream: None)


def _experts() -> None:
    """megatron/core/transformer/moe/moe_utils.py names te_general_gemm even where Transformer Engine is missing.

    token_dispatcher.py makes sizes of messages from counts on a GPU alone.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def sizes(counts: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return counts.numpy() if as_numpy and isinstance(counts, torch.Tensor) else counts

    _put(token_dispatcher, "maybe_move_tensor_to_cpu", sizes)

    if not hasattr(moe_utils, "te_general_gemm"):
        _put(moe_utils, "te_general_gemm", None)
