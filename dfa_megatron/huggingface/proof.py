"""Prove a transformers model that shares its sequences: many ranks are compared with one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.current_forward import CONTEXT, LayerContext
from dfa_megatron.huggingface.distribute import local_attention, transformers_model
from dfa_megatron.proving import Job, Proof, Text, examine
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import local_positions


def prove(model: torch.nn.Module, *, tokens: int | None = None) -> Proof:
    """Compare a distributed model on its ranks with itself on each rank alone, with its former attention.

    A random sequence and a pack run forward and backward, as in training. Compared are the loss, the output of every
    layer for each token, and the gradient of every parameter. Gradients are averaged by DDP or FSDP if the model is
    theirs, and else here. Weights, gradients, modes and the random state are as before. Every rank must call this.

    Args:
        model: on which `distribute_attention` was called, or which holds one (PEFT, DDP), or FSDP2 shards.
        tokens: of the sequence, at least; None is 48 for each rank, or twice the smallest window up to 2048.

    Returns:
        What was compared, as a table: `print(proof)`.

    Raises:
        ProofError: something differs; the first layer, rank and token are named.
        UnsupportedError: attention is not distributed, or the model is multimodal.
    """
    return examine(ModelJob(model), tokens)


class ModelJob(Job):
    """A transformers model, alone or inside of what averages its gradients."""

    def __init__(self, model: Any) -> None:
        self.models, self.model = [model], model
        self.inner = transformers_model(model)
        context: LayerContext | None = getattr(self.inner, CONTEXT, None)
        kind, why, instead = type(self.inner).__name__, "", ""
        if context is None:
            why, instead = "its attention is not distributed", "distribute_attention before it"
        elif context.multimodal:
            why, instead = "texts have no images or sound", "prove of a model that has its language model alone"
        elif self.inner.get_output_embeddings() is None:
            why, instead = "it has no head, so no loss to start a backward from", "prove of LlamaForCausalLM or like"
        if context is None or why:
            raise UnsupportedError(f"prove of a {kind}", why, instead)
        config = self.inner.config.get_text_config()
        self.words, self.padding = config.vocab_size, config.pad_token_id
        self.name = context.group
        self.group = resolve(context.group)
        self.ranks, self.share = context.size, 1 / context.size
        sharded = any(hasattr(x, "_local_tensor") for x in model.parameters())
        self.sums = not (sharded or isinstance(model, DistributedDataParallel))
        dtype = str(next(self.inner.parameters()).dtype).removeprefix("torch.")
        self.title = f"{kind} in {dtype}, {self.ranks} ranks against one"

    def watched(self) -> Iterable[tuple[str, torch.nn.Module, bool]]:
        """Yield every layer, and each part of it after which attention or another mixer was called."""
        named = dict(self.inner.named_modules())
        mixers = {name for name, x in named.items() if hasattr(x, CONTEXT) and hasattr(x, "layer_idx")}
        indexers = {name for name in mixers if name.rpartition(".")[0] in mixers}
        layers = {name.rpartition(".")[0] for name in mixers - indexers}
        for name, module in named.items():
            if name in layers or name in indexers or name.rpartition(".")[0] in layers:
                yield name, module, name in mixers

    def places(self, text: Text, *, alone: bool) -> torch.Tensor:
        """Return this rank's part of the text in order, or all of it."""
        return torch.arange(len(text.ids)) if alone else local_positions(len(text.ids), group=self.name or None)

    def step(self, text: Text, *, alone: bool) -> torch.Tensor:
        """Call the model as a loop of training does."""
        batch: dict[str, Any] = {"input_ids": text.ids[None], "labels": text.labels[None]}
        if alone:
            batch = {"input_ids": text.rows(text.ids), "labels": text.rows(text.labels), "use_cache": False}
        elif text.documents > 1:
            batch["position_ids"] = text.positions[None]
        loss: torch.Tensor = self.model(**batch).loss
        self.backward(loss)
        return loss.detach()

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward."""
        loss.backward()

    def alone(self) -> AbstractContextManager[Any]:
        """Return the context of the former attention."""
        return local_attention(self.model)

    def windows(self) -> Iterable[int]:
        """Yield the window of the config."""
        config = self.inner.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        return [window] if window and getattr(config, "use_sliding_window", True) else []
