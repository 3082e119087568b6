"""Record q, k, v, the output and the gradients of every attention by hooks of its module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.selfcheck.model import Parallel
from dfa_megatron.selfcheck.record import Recorder
from dfa_megatron.selfcheck.train import record_attention

_AXES = ("token", "sample", "head", "channel")


def tokens_of(parallel: Parallel, tokens: int, *, inside: bool) -> torch.Tensor:
    """Return the global indices of this rank's tokens, inside the layers or in the data.

    The layouts are computed here a second time, so that a mistake in the package's slicing shows.
    """
    from megatron.core import parallel_state

    everything = torch.arange(tokens)
    if parallel.options is None or parallel.cp == 1:
        return everything
    rank, layout = parallel_state.get_context_parallel_rank(), parallel.options.data_layout
    if layout == "contiguous" or (layout == "boundary" and inside):
        contiguous: torch.Tensor = everything.chunk(parallel.cp)[rank]
        return contiguous
    chunks = everything.chunk(2 * parallel.cp)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def watch(chunks: Sequence[Any], recorder: Recorder, parallel: Parallel, scale: float) -> str:
    """Record from now on, gradients times `scale`; return how many ranks each attention is spread over ("2")."""
    sizes = set()
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            mixer = layer.mixer if hasattr(layer, "mixer") else layer.self_attention
            core = getattr(mixer, "core_attention", None)
            if core is None:
                if next(mixer.parameters(), None) is not None:  # an MLP's layer has nothing there
                    mixer.register_forward_hook(_of_states(recorder, parallel, layer.layer_number))
                continue
            core.register_forward_hook(_hook(recorder, parallel, scale, layer.layer_number), with_kwargs=True)
            sizes.add(dist.get_world_size(core.cp_group) if isinstance(core, DistributedCoreAttention) else 1)
    return ", ".join(str(size) for size in sorted(sizes))


def _of_states(recorder: Recorder, parallel: Parallel, number: int) -> Any:
    """Return a hook that records the output of a mixer, (tokens, samples, channels)."""

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        if module.training:
            out = output[0]
            places = {0: tokens_of(parallel, out.shape[0] * parallel.cp, inside=True)}
            recorder.add("output of states", f"layer {number}", out, ("token", "sample", "channel"), places)

    return after


def _hook(recorder: Recorder, parallel: Parallel, scale: float, number: int) -> Any:
    def places(x: torch.Tensor) -> dict[int, torch.Tensor]:
        from megatron.core import parallel_state

        found = {0: tokens_of(parallel, x.shape[0] * parallel.cp, inside=True)}
        if parallel.tp > 1:
            found[2] = torch.arange(x.shape[2]) + x.shape[2] * parallel_state.get_tensor_model_parallel_rank()
        return found

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
        if not module.training:
            return
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        inputs = {"q": given["query"], "k": given["key"], "v": given["value"]}
        record_attention(recorder, f"layer {number}", inputs, _AXES, places, scale)
        rows = out.unflatten(2, (given["query"].shape[2], -1))
        recorder.add("output of attention", f"layer {number}", rows, _AXES, places(rows))

    return after
