"""Hooks that record q, k, v, the output and the gradients of every attention, with the places of this rank's part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.selfcheck.model import Parallel
from dfa_megatron.selfcheck.record import Recorder

_AXES = ("token", "sample", "head", "channel")


def tokens_of(parallel: Parallel, tokens: int, *, inside: bool) -> torch.Tensor:
    """The global indices of this rank's tokens: inside the layers, or in the data.

    Written down here once more, so that a mistake in the package's own slicing shows.
    """
    from megatron.core import parallel_state

    everything = torch.arange(tokens)
    if parallel.options is None or parallel.cp == 1:
        return everything
    rank, layout = parallel_state.get_context_parallel_rank(), parallel.options.data_layout
    if layout == "contiguous" or (layout == "boundary" and inside):
        contiguous: torch.Tensor = everything.chunk(parallel.cp)[rank]
        return contiguous
    pieces = everything.chunk(2 * parallel.cp)
    return torch.cat([pieces[rank], pieces[-1 - rank]])


def watch(chunks: Sequence[Any], recorder: Recorder, parallel: Parallel, scale: float) -> str:
    """Record from now on, gradients times `scale`; return how many ranks each attention is spread over ("2")."""
    sizes = set()
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            core = layer.self_attention.core_attention
            core.register_forward_hook(_hook(recorder, parallel, scale, layer.layer_number), with_kwargs=True)
            sizes.add(dist.get_world_size(core.cp_group) if isinstance(core, DistributedCoreAttention) else 1)
    return ", ".join(str(size) for size in sorted(sizes))


def _hook(recorder: Recorder, parallel: Parallel, scale: float, number: int) -> Any:
    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        if not module.training:
            return
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        for name, x in (("q", given["query"]), ("k", given["key"]), ("v", given["value"])):
            places = _places(parallel, x)
            recorder.add("q, k, v", f"layer {number} {name}", x, _AXES, places)
            if x.requires_grad:
                x.register_hook(_gradient(recorder, f"layer {number} d{name}", places, scale))
        heads = given["query"].shape[2]
        rows = out.unflatten(2, (heads, -1))
        recorder.add("output of attention", f"layer {number}", rows, _AXES, _places(parallel, rows))

    return after


def _gradient(recorder: Recorder, name: str, places: dict[int, torch.Tensor], scale: float) -> Any:
    def take(gradient: torch.Tensor) -> None:
        recorder.add("gradients of q, k, v", name, gradient * scale, _AXES, places)

    return take


def _places(parallel: Parallel, x: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of (tokens, samples, heads, channels) on this rank."""
    from megatron.core import parallel_state

    places = {0: tokens_of(parallel, x.shape[0] * parallel.cp, inside=True)}
    if parallel.tp > 1:
        places[2] = torch.arange(x.shape[2]) + x.shape[2] * parallel_state.get_tensor_model_parallel_rank()
    return places
