"""Record q, k, v, output and gradients of every attention, where transformers calls its attention functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.attention_function import NAME, attention
from dfa_megatron.huggingface.layer_context import CONTEXT
from dfa_megatron.huggingface.recurrent.layers import layers_of
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.selfcheck.record import Recorder
from dfa_megatron.selfcheck.train import record_attention

_EAGER = "eager_attention_forward"
"""Name of the eager attention in every modelling file of transformers."""
_HEADS_FIRST = ("sample", "head", "token", "channel")
_AXES = ("sample", "token", "head", "channel")
FACT = "ranks of each attention"


class Watch:
    """Record attentions that run in training while `on`.

    Attributes:
        tokens: the global indices of this rank's tokens.
        scale: makes gradients those of the mean loss.
    """

    def __init__(self, recorder: Recorder, tokens: torch.Tensor, scale: float) -> None:
        self.recorder, self.tokens, self.scale, self.on = recorder, tokens, scale, True
        self._sizes: set[int] = set()

    def of_ours(self) -> None:
        """Watch the attention implementation of this package; call it after `distribute_attention`."""
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, self._wrapped(attention))

    def of_theirs(self, model: torch.nn.Module) -> None:
        """Watch the eager attention of the model's own file; without one nothing is recorded of attention."""
        for name in {type(module).__module__ for module in model.modules() if hasattr(module, "layer_idx")}:
            names = vars(sys.modules[name])
            if _EAGER in names:
                names[_EAGER] = self._wrapped(names[_EAGER])

    def of_states(self, model: torch.nn.Module) -> None:
        """Watch the outputs of the layers that carry a state, (samples, tokens, channels)."""
        inner = {*layers_of(model)}
        for name, module in model.named_modules():
            if module in inner:
                module.register_forward_hook(self._output_of(name))

    def _output_of(self, name: str) -> Callable[..., None]:
        def after(module: torch.nn.Module, args: Any, output: Any) -> None:
            if self.on and module.training:
                out = output[0] if isinstance(output, tuple) else output
                self.recorder.add("output of states", name, out, ("sample", "token", "channel"), {1: self.tokens})

        return after

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            result = real(module, query, key, value, *args, **kwargs)
            self._count(module)
            if self.on and module.training:
                self._record(module, {"q": query, "k": key, "v": value}, result[0])
            return result

        return recorded

    def _record(self, module: Any, given: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        layer = f"layer {module.layer_idx}"
        record_attention(self.recorder, layer, given, _HEADS_FIRST, lambda _: {2: self.tokens}, self.scale)
        self.recorder.add("output of attention", layer, out, _AXES, {1: self.tokens})

    def _count(self, module: Any) -> None:
        """Record over how many ranks the attentions that have run are spread."""
        context = getattr(module, CONTEXT, None)
        if context is not None:
            self._sizes.add(dist.get_world_size(resolve(context.group)) if context.group else 1)
            self.recorder.fact(FACT, ", ".join(str(size) for size in sorted(self._sizes)))
