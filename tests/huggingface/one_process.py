"""Compute on one process, with a model's own attention, what ranks that share a batch must come to; and compare."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from dfa_megatron.huggingface.current_forward import CONTEXT, Forward, enter, leave
from dfa_megatron.layouts import contiguous
from dfa_megatron.loss.scores import IGNORED
from dfa_megatron.masks import Mask
from tests.frameworks.compare import gradients_of
from tests.fuzz.frameworks.uneven import cells
from tests.huggingface.sweep import images
from tests.support.close import assert_close
from tests.support.recurrences import by_path

Batch = Mapping[str, Any]
Gradients = Mapping[str, torch.Tensor]
TOLD = ("labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "prompt_tree", "mask")
"""What a batch tells a distributed model, and a call of one document does not need."""


class Float64(TorchFunctionMode):
    """Compute in float64 what models ask for in float32: norms, softmax, rotary embeddings, states."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None and len(args) == 1 and func is not torch.Tensor.float:  # most: a shape, a dtype
            return func(*args)
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func is torch.full:  # of a least number, which float32 does not have
            kwargs = {"dtype": torch.float64} | (kwargs or {})
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def first_of_equals() -> AbstractContextManager[Any]:
    """Have `topk` of tensors choose the first of equal numbers, which PyTorch leaves open."""

    def topk(x: torch.Tensor, count: int, dim: int = -1, **_: Any) -> Any:
        values, order = x.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, count), order.narrow(dim, 0, count)))

    return patch.object(torch.Tensor, "topk", topk)


def following(labels: torch.Tensor) -> torch.Tensor:
    """Return the label of each token's successor."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def segments(batch: Batch) -> list[tuple[tuple[int, ...], Sequence[int]]]:
    """Return the offsets of each row's documents, or of its segments with their parents."""
    rows, length = batch["input_ids"].shape
    if tree := batch.get("prompt_tree"):
        offsets = (0, *torch.tensor(tree[0]).cumsum(0).tolist())
        return [(offsets, tree[1])] * rows
    if "mask" in batch:
        return [((0, length), ())] * rows
    if (places := batch.get("position_ids")) is not None:
        first = (places[0] if places.dim() == 3 else places).expand(rows, -1)
        return [((*(row == 0).nonzero().flatten().tolist(), length), ()) for row in first]
    if (offsets := batch.get("cu_seq_lens_q")) is not None:
        own = [[int(at) - row * length for at in offsets] for row in range(rows)]
        return [(tuple(at for at in row if 0 <= at <= length), ()) for row in own]
    return [((0, length), ())] * rows


def total_loss(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return logits, the summed loss, and how many tokens count; a router's own loss counts for each of them."""
    labels = following(batch["labels"]).flatten()
    count = int((labels != IGNORED).sum())
    logits, balance = _logits(model, batch)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return logits, loss + balance * count, count


def _logits(model: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
    """Return logits, and the weighed loss of routers where the model computes one."""
    if "mask" in batch:
        return _under(model, batch, batch["mask"])
    rows, own = segments(batch), {name: x for name, x in batch.items() if name not in TOLD}
    if all(len(offsets) == 2 for offsets, _ in rows):
        out = model(**own, use_cache=False)
        aux = getattr(out, "aux_loss", None)
        return out.logits, 0.0 if aux is None else model.config.router_aux_loss_coef * aux
    if "pixel_values" in own:
        ((offsets, _),) = rows
        return torch.cat([model(**images.part(own, lo, hi)).logits for lo, hi in pairwise(offsets)], 1), 0.0
    found = []
    for row, (offsets, parents) in enumerate(rows):
        tokens = {name: x[row : row + 1] for name, x in own.items()}
        found.append(by_path(lambda path: model(**path, use_cache=False).logits, tokens, offsets, parents))
    return torch.cat(found), 0.0


def _under(model: Any, batch: Batch, mask: Mask) -> tuple[torch.Tensor, Any]:
    """Return the logits of attention with a mask in memory, and in layers with a window with its part that is near."""
    positions = batch.get("position_ids", torch.arange(mask.length)[None])
    seen, window = cells(mask), getattr(model.config, "sliding_window", None)
    near = seen if window is None else seen & (positions[0][:, None] - positions[0] < window)
    added = {
        kind: torch.zeros(cells.shape, dtype=model.dtype).masked_fill(~cells, -1e30)[None, None]
        for kind, cells in (("full_attention", seen), ("sliding_attention", near))
    }
    both = added if hasattr(model.config, "layer_types") else added["sliding_attention"]
    given = {"input_ids": batch["input_ids"], "attention_mask": both, "position_ids": positions}
    if not getattr(model.config, "output_router_logits", False):
        return model(**given).logits, 0.0
    found = model.model(**given, output_router_logits=True)
    balance = inspect.unwrap(vars(sys.modules[type(model).__module__])["load_balancing_loss_func"])
    experts, chosen = model.config.num_local_experts, model.config.num_experts_per_tok
    return model.lm_head(found.last_hidden_state), model.config.router_aux_loss_coef * balance(
        found.router_logits, experts, chosen
    )


@contextmanager
def called(layer: torch.nn.Module, tokens: int) -> Iterator[None]:
    """A layer's model is called on one rank with so many tokens."""
    enter(layer, Forward(getattr(layer, CONTEXT), distributed=True, layout=contiguous(tokens, 1)))
    try:
        yield
    finally:
        leave(layer)


def assert_same(found: Gradients, wanted: Gradients, name: str, tolerance: float) -> None:
    """Two models have the same gradients, for every parameter."""
    assert found.keys() == wanted.keys()
    for key, want in wanted.items():
        assert_close(found[key], want, tolerance=tolerance, name=f"{name} {key}")


def assert_loss(loss: torch.Tensor, want: torch.Tensor, name: str, tolerance: float = 1e-5) -> None:
    """Every rank has the loss of the whole batch."""
    assert_close(loss.detach(), want, tolerance=tolerance, name=f"{name} loss")


def assert_gradients(model: Any, wanted: Gradients, name: str, tolerance: float = 1e-5) -> None:
    """The mean of the ranks' gradients is that of one process, for every parameter."""
    found = {key: gradient / dist.get_world_size() for key, gradient in gradients_of(model, None).items()}
    assert_same(found, wanted, name, tolerance)
