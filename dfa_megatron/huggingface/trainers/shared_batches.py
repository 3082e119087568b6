"""Let a model take whole batches, the same on every rank of a group, as trainers hand them over.

Hooks cut each batch into this rank's part. In evaluation they put the outputs together again, on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.batch import KNOWN, OTHER_SENSES, TYPE_IDS, refuse_batch, shard_batch
from dfa_megatron.huggingface.layer_context import CONTEXT, LayerContext
from dfa_megatron.huggingface.model_inputs import arguments_of
from dfa_megatron.huggingface.padding import IGNORED, gathered
from dfa_megatron.huggingface.parts.text_part import is_distributed
from dfa_megatron.huggingface.positions.batch_number import refuse_different_batches
from dfa_megatron.huggingface.positions.document_starts import FLASH_KEYS, of_offsets, positions_of
from dfa_megatron.runtime.comm.groups import resolve
from dfa_megatron.sharding import unshard_sequence

_SHARED = "_dfa_shared"
"""The attribute of a model that holds its `Shared`."""


@dataclass(slots=True)
class Shared:
    """Hold what the hooks of a model tell each other.

    logits: whether evaluation puts logits together; whoever reads the loss alone saves their memory.
    count_of_whole: whether `num_items_in_batch`, where given, counts whole batches; Trainer's is this rank's share.
    rows: of the present batch.
    length: tokens of it, without those that made its length divide.
    labelled: whether a label of it counts, on its device; None without labels.
    """

    logits: bool = True
    count_of_whole: bool = True
    rows: int = 0
    length: int = 0
    labelled: torch.Tensor | None = None


def take_whole_batches(model: Any) -> Shared:
    """Register the hooks of a transformers model that `distribute_attention` prepared; may be called again."""
    known: Shared | None = getattr(model, _SHARED, None)
    if known is None:
        known = Shared()
        setattr(model, _SHARED, known)
        model.register_forward_pre_hook(_cut, with_kwargs=True, prepend=True)  # before the checks of a part
        model.register_forward_hook(_join)
    return known


def takes_whole_batches(model: Any) -> bool:
    """Return whether a model cuts its batches itself."""
    return hasattr(model, _SHARED)


def check_parallelism(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse accelerate's own context parallelism, where `distribute_accelerator` did not leave it out."""
    state = sys.modules.get("accelerate.state")
    if state is None or hasattr(model, _SHARED) or not is_distributed(model):
        return
    config = state.AcceleratorState._shared_state.get("parallelism_config")
    size = getattr(config, "cp_size", 1)
    if size > 1:
        raise UnsupportedError(
            f"distribute_attention beside ParallelismConfig(cp_size={size}) of accelerate",
            "accelerate would drop the masks of layers, and cut batches a second time",
            "distribute_accelerator(accelerator, model), or distribute_trainer(trainer)",
        )


def _cut(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace a whole batch by this rank's part; the count of labels, if given, is the caller's, of whole batches."""
    if not is_distributed(model):
        return None
    context: LayerContext = getattr(model, CONTEXT)
    given = {name: value for name, value in arguments_of(model, args, kwargs).items() if value is not None}
    batch = {name: given.pop(name) for name in (*KNOWN, *OTHER_SENSES) if name in given}
    kept = given.get("logits_to_keep")
    if "input_ids" not in batch:
        refuse_batch((*batch, *given))
    if isinstance(kept, torch.Tensor) or kept:
        raise UnsupportedError(
            "logits_to_keep of shared batches, which generate() asks for too",
            "each rank would keep its own part's, and generation needs the keys of whole sequences on one rank",
            "logits_to_keep=0; or model.generate within dfa_megatron.huggingface.local_attention(model)",
        )
    if context.options.verify != "off":
        _check_same(batch, context.group)
    shared: Shared = getattr(model, _SHARED)
    shared.rows, shared.length = batch["input_ids"].shape[:2]
    labels = batch.get("labels")
    shared.labelled = None if labels is None else (labels[..., 1:] != IGNORED).any()
    whole = padded(batch, context.size)
    context.current.added = whole["input_ids"].shape[1] - shared.length
    part = shard_batch(whole, group=context.group or None)
    made = part.keys() - {"num_items_in_batch"}
    others = ", ".join(name for name, x in given.items() if name in made or _has_tokens(x, shared.length))
    if others:
        raise UnsupportedError(
            f"{others} beside the tokens of a shared batch",
            "they would stay whole, or take the place of what is made for this rank's part",
            "input_ids and labels, of which shift_labels are made",
        )
    if shared.count_of_whole and (count := given.get("num_items_in_batch")) is not None:
        given["num_items_in_batch"] = count / context.size
    return (), part | given


def _join(model: Any, args: Any, output: Any) -> Any:
    """Give every rank the mean of the losses, and in evaluation the outputs of all tokens.

    In training the gradient stays that of this rank's part. In evaluation, without a label that counts, the loss is
    NaN, as in one process: Trainer leaves it out of its mean.
    """
    context: LayerContext = getattr(model, CONTEXT)
    if not is_distributed(model) or context.size == 1:
        return None
    shared: Shared = getattr(model, _SHARED)
    local = -(-shared.length // context.size)

    def whole(value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0:
            total = value.detach().clone()
            dist.all_reduce(total, group=resolve(context.group))
            return total / context.size
        if value.dim() < 3 or value.shape[:2] != (shared.rows, local):
            return value
        return unshard_sequence(value, group=context.group)[:, : shared.length]

    def loss(value: torch.Tensor) -> torch.Tensor:
        assert shared.labelled is not None
        if model.training:
            return whole(value) + (value - value.detach())
        return torch.where(shared.labelled.to(value.device), whole(value), torch.nan)

    has_loss = shared.labelled is not None
    if isinstance(output, tuple) and has_loss:
        others = output[1:] if model.training else tree_map_only(torch.Tensor, whole, output[1:])
        return loss(output[0]), *others
    if not isinstance(output, Mapping):
        return None if model.training else tree_map_only(torch.Tensor, whole, output)
    for name, value in list(output.items()):
        if has_loss and name == "loss":
            output[name] = loss(value)  # type: ignore[index]
        elif not model.training and name in _OF_TOKENS and (name != "logits" or shared.logits):
            output[name] = tree_map_only(torch.Tensor, whole, value)  # type: ignore[index]
    return output


def _has_tokens(value: Any, length: int) -> bool:
    """Return whether an argument may hold something for each token of whole sequences."""
    return isinstance(value, torch.Tensor) and length in value.shape


_OF_TOKENS = ("loss", "logits", "last_hidden_state", "hidden_states")
"""The outputs that are put together; others, such as a router's or a tower's, may be as long by chance."""


def padded(batch: Mapping[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Return a batch with tokens without labels behind its rows, so that `size` divides their length.

    They belong to the last document of their row: causal attention hides them from all others. With images or sound
    the batch stays as it is.
    """
    rows, length = batch["input_ids"].shape[:2]
    missing = -length % size
    if not missing or any(name in batch for name in OTHER_SENSES):
        return dict(batch)
    new = dict(batch)
    for name, value in (("input_ids", 0), ("labels", IGNORED), ("attention_mask", 0), (TYPE_IDS, 0)):
        if name in new:
            new[name] = torch.nn.functional.pad(new[name], (0, missing), value=value)
    positions = new.get("position_ids")
    if positions is None and {"cu_seq_lens_q", "cu_seq_lens_k"} & set(new):
        positions = positions_of(of_offsets(new, rows, length), new["input_ids"].device)
    if positions is not None:
        behind = positions[:, -1:] + torch.arange(1, missing + 1, device=positions.device)
        new["position_ids"] = torch.cat((positions, behind), dim=1)
        return {name: value for name, value in new.items() if name not in FLASH_KEYS}  # which say the same
    return new


def _check_same(batch: Mapping[str, torch.Tensor], group: str) -> None:
    """Refuse batches that differ between the ranks of a group; all ranks raise. One small message."""
    device = next(iter(batch.values())).device
    facts = torch.zeros(9, dtype=torch.int64, device=device)
    for place, name in enumerate(("input_ids", "labels", "position_ids")):
        value = batch.get(name)
        if value is not None and value.dim() == 2:
            weights = torch.arange(1, value.numel() + 1, device=device)
            facts[3 * place : 3 * place + 2] = torch.tensor(value.shape)
            facts[3 * place + 2] = (value.flatten() * weights).sum()
    found = torch.stack(gathered(facts, group))
    if bool((found != found[0]).any()):
        refuse_different_batches()
