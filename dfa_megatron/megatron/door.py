"""The door of a language model: in layout `boundary` its tokens are in the caller's order outside, and in order inside.

What a call gives of every token (ids, positions, labels, masks) comes in by one all-to-all of integers, on each
pipeline stage that gets it. The losses of tokens go back by one of floats. Without labels hidden states go back, before
the output layer: logits never travel. So layers, prediction layers, experts and losses know one order.

`follow_language_models` replaces one name in the process: LanguageModule.__init__, which adds two hooks to each model.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dfa_megatron.megatron.layers.context import CONTEXT, AttentionContext
from dfa_megatron.megatron.layers.sharing import SharingLayer
from dfa_megatron.megatron.refusals import BATCHES, CALLS, LAYERS
from dfa_megatron.megatron.tokens.batch import check_declared, check_positions
from dfa_megatron.megatron.tokens.exchange import LayoutName, Relayout
from dfa_megatron.megatron.tokens.own_group import group_of
from dfa_megatron.megatron.tokens.packed_documents import is_ours, place
from dfa_megatron.runtime.cu_seqlens import Offsets

_MARK = "_dfa_megatron"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: integers that hold any of them."""


@dataclass
class Visit:
    """Hold what the call of a model needs until it returns."""

    model: Any
    group: Any
    exchange: Relayout
    order: LayoutName
    """The caller's order of the tokens."""
    offsets: Offsets
    """Of the documents inside; () without."""
    rows: tuple[int, int]
    """Batch and tokens of this rank."""
    labelled: bool
    predicting: bool = False
    """The output layer is called for prediction layers, whose labels are inside."""
    outputs: int = 0
    """How often hidden states went back."""
    handles: list[Any] = field(default_factory=list)

    def of_tokens(self, x: Any) -> bool:
        """Return whether a tensor is (batch or 1, tokens, ...)."""
        return (
            isinstance(x, torch.Tensor)
            and x.dim() > 1
            and x.shape[1] == self.rows[1]
            and x.shape[0] in (1, self.rows[0])
        )

    def enter(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors of a call that are of tokens, in order."""
        tokens = {name: x for name, x in given.items() if self.of_tokens(x)}
        packed = {name: x for name, x in tokens.items() if x.dim() == 2 and not x.requires_grad}
        moved = {name: self._by_token(x, self.order, "contiguous") for name, x in tokens.items() if name not in packed}
        if packed:
            bits = [x.contiguous().view(_INTEGERS[x.element_size()]).long() for x in packed.values()]
            rows = self.exchange.move(torch.cat(bits).mT, self.order, "contiguous").mT
            parts = rows.split([len(x) for x in packed.values()])
            for (name, x), part in zip(packed.items(), parts, strict=True):
                moved[name] = part.to(_INTEGERS[x.element_size()]).contiguous().view(x.dtype)
        return moved

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens, ...) in the caller's order; gradients go the other way."""
        return self._by_token(x, "contiguous", self.order)

    def _by_token(self, x: torch.Tensor, source: LayoutName, target: LayoutName) -> torch.Tensor:
        return self.exchange(x.transpose(0, 1).contiguous(), source, target).transpose(0, 1).contiguous()

    def hidden(self, x: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Return hidden states (tokens [/ TP under sequence parallelism], batch, hidden) in the other order."""
        from megatron.core.tensor_parallel import (
            gather_from_sequence_parallel_region,
            scatter_to_sequence_parallel_region,
        )

        way = ("contiguous", self.order) if back else (self.order, "contiguous")
        if not self.model.config.sequence_parallel:
            return self.exchange(x, *way)
        tp = self.model.pg_collection.tp
        whole = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=tp)
        scattered: torch.Tensor = scatter_to_sequence_parallel_region(self.exchange(whole, *way), group=tp)
        return scattered


class _Running(threading.local):
    def __init__(self) -> None:
        self.visits: list[Visit] = []


_RUNNING = _Running()


def visit_of_thread() -> Visit | None:
    """Return what the innermost model that runs knows, None where its tokens are in the caller's order."""
    return _RUNNING.visits[-1] if _RUNNING.visits else None


def follow_language_models() -> None:
    """Give every language model that is built from now on a door. A second call changes nothing."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    megatrons = LanguageModule.__init__
    if hasattr(megatrons, _MARK):
        return

    @functools.wraps(megatrons)
    def with_door(self: Any, *args: Any, **kwargs: Any) -> None:
        megatrons(self, *args, **kwargs)
        self.register_forward_pre_hook(_enter, with_kwargs=True)
        self.register_forward_hook(_leave, always_call=True)

    setattr(with_door, _MARK, megatrons)
    LanguageModule.__init__ = with_door


def context_of(model: Any) -> AttentionContext | None:
    """Return the context of a distributed model, None of another; from its spec, since a stage may hold no layer."""
    for spec in vars(model).values():
        parts = getattr(spec, "submodules", None)
        for part in (spec, *(getattr(spec, "layer_specs", None) or ()), *(vars(parts) if parts else {}).values()):
            params = getattr(part, "params", None) or {}
            found = params.get("distributed_attention") if isinstance(params, dict) else None
            if found is not None or (found := getattr(part, CONTEXT, None)) is not None:
                return found  # type: ignore[no-any-return]
    return next((layer._dfa for layer in model.modules() if isinstance(layer, SharingLayer)), None)


def _prepared(model: Any) -> AttentionContext | None:
    """Return the context of a model; at its first call its layers are looked at."""
    if "_dfa_context" not in vars(model):
        context = vars(model)["_dfa_context"] = context_of(model)
        if context is not None:
            vars(model)["_dfa_other_layer"] = _has_other_layers(model, context.options.layout_inside)
            if context.options.data_layout == "boundary":
                for block in _blocks(model):
                    block.register_forward_pre_hook(_check_extracted, with_kwargs=True)
    return vars(model)["_dfa_context"]  # type: ignore[no-any-return]


def _blocks(model: Any) -> Iterator[Any]:
    from megatron.core.transformer.transformer_block import TransformerBlock

    return (module for module in model.modules() if isinstance(module, TransformerBlock))


def _has_other_layers(model: torch.nn.Module, order: str) -> bool:
    """Tell the layers of a model that it has a door; return whether one has an attention that knows another order."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_layer import TransformerLayer

    found = False
    for layer in model.modules():
        if isinstance(layer, SharingLayer):
            layer.dfa_has_door = True
            found |= layer._dfa.options.layout_inside != order
        elif isinstance(layer, TransformerLayer):
            found |= isinstance(layer.self_attention, Attention)
    return found


def _check_extracted(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to give back hidden states between layers, whose order the caller would mistake."""
    given = inspect.signature(block.forward).bind(*args, **kwargs).arguments
    CALLS.check(extracted=given.get("extract_layer_indices") or None)


def _enter(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = _prepared(model)
    if context is None:
        return None
    names = _names(model)[: len(args)]
    CALLS.check(unnamed=type(model).__name__ if len(names) < len(args) else None)
    given = {**dict(zip(names, args, strict=True)), **kwargs}
    packed = given.get("packed_seq_params")
    group = model.pg_collection.cp if packed is None else group_of(packed) or model.pg_collection.cp
    rows = _rows(model, given)
    LAYERS.check(
        context.options,
        context_parallel_size=group.size(),
        other_layer=vars(model)["_dfa_other_layer"],
        in_pack=packed is not None,
    )
    _check_positions(context, given.get("position_ids"), rows, packed, group)
    if context.options.data_layout != "boundary" or group.size() == 1:
        return None
    order: LayoutName = "zigzag"
    offsets: Offsets = ()
    several = False
    if packed is not None:
        pack = place(packed)
        several = pack.group is None or len(pack.offsets) > 2
        if pack.is_cut_by_documents(group):
            pack = context.cut_pack(packed, group, rows[1])
        order, offsets = pack.order, pack.offsets
    check_declared(group, "boundary", rows[1], packed=several, ours=packed is not None and is_ours(packed))
    visit = Visit(model, group, context.relayout(group), order, offsets, rows, given.get("labels") is not None)
    _RUNNING.visits.append(visit)
    inside = _moved(visit, given)
    return tuple(inside.pop(name) for name in names), inside


def _moved(visit: Visit, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as the model gets them, and see that what goes back does."""
    model = visit.model
    states, embedded = given.get("extra_block_kwargs"), given.get("decoder_input")
    inside = {**given, **visit.enter({name: x for name, x in given.items() if name != "decoder_input"})}
    CALLS.check(extracted=states or None)
    if embedded is not None:
        inside["decoder_input"] = visit.hidden(embedded, back=False)
    elif not model.pre_process and _at_end(model, first=True):
        model.set_input_tensor(visit.hidden(model.decoder.input_tensor, back=False))
    processor = given.get("output_processor")
    if processor is not None:
        inside["output_processor"] = functools.partial(_process, visit, processor, given)
    elif model.post_process and not visit.labelled:
        hook = model.output_layer.register_forward_pre_hook(functools.partial(_output, visit), with_kwargs=True)
        visit.handles.append(hook)
    return inside


def _names(model: Any) -> list[str]:
    """Return the names of the arguments that a model takes by place; of a class above it that says them."""
    for home, bound in ((vars(model), 0), *((vars(base), 1) for base in type(model).__mro__)):
        parameters = inspect.signature(home["forward"]).parameters.values() if "forward" in home else ()
        if parameters and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][bound:]
    return []


def _rows(model: Any, given: dict[str, Any]) -> tuple[int, int]:
    """Return the batch and the tokens of this rank."""
    for name in ("input_ids", "labels", "position_ids", "loss_mask", "padding_mask"):
        x = given.get(name)
        if isinstance(x, torch.Tensor) and x.dim() == 2:
            return x.shape[0], x.shape[1]
    states: Any = given.get("decoder_input")
    states = model.decoder.input_tensor if states is None else states
    splits = model.pg_collection.tp.size() if model.config.sequence_parallel else 1
    return states.shape[1], states.shape[0] * splits


def _check_positions(context: AttentionContext, positions: Any, rows: tuple[int, int], packed: Any, group: Any) -> None:
    """Refuse the positions of an uncut batch; those on a device once for each length, as the host must wait."""
    if positions is None:
        return
    if positions.dim() == 3:
        BATCHES.check(axes_tokens=positions.shape[2], all_tokens=rows[1] * group.size())
    elif packed is None and (positions.device.type == "cpu" or rows[1] not in context.lengths):
        context.lengths.add(rows[1])
        check_positions(group, context.options.data_layout, positions)


def _at_end(model: Any, *, first: bool) -> bool:
    """Return whether a model is the first, or the last, stage of its pipeline."""
    from megatron.core.pipeline_parallel import utils

    end = "first" if first else "last"
    virtual = getattr(utils, f"is_vp_{end}_stage")(model.vp_stage, model.vp_size)
    return virtual and getattr(utils, f"is_pp_{end}_stage")(model.pp_group)  # type: ignore[no-any-return]


def _output(visit: Visit, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give the output layer of a call without labels hidden states in the caller's order."""
    if visit.predicting:
        return None
    visit.outputs += 1
    if args:
        return (visit.hidden(args[0], back=True), *args[1:]), kwargs
    return args, {**kwargs, "input_": visit.hidden(kwargs["input_"], back=True)}


def _process(visit: Visit, processor: Any, outside: dict[str, Any], *, hidden_states: Any, **asked: Any) -> Any:
    """Call the caller's own output processor with everything in the caller's order."""
    visit.labelled = False  # what it returns is in that order
    known = {name: x for name, x in outside.items() if name in asked and x is not None}
    if "decoder_input" not in known and asked.get("decoder_input") is not None:
        known["decoder_input"] = visit.hidden(asked["decoder_input"], back=True)
    return processor(hidden_states=visit.hidden(hidden_states, back=True), **{**asked, **known})


def _leave(model: Any, args: Any, output: Any) -> Any:
    visit = visit_of_thread()
    if visit is None or visit.model is not model:
        return None
    _RUNNING.visits.pop()
    for handle in visit.handles:
        handle.remove()
    if output is None:  # the model raised
        return None
    if not model.post_process:
        return visit.hidden(output, back=True) if _at_end(model, first=False) else None
    if not visit.labelled:
        CALLS.check(no_output=bool(visit.handles) and not visit.outputs)
        return None

    def back(x: Any) -> Any:
        CALLS.check(
            other_result=None if isinstance(x, (torch.Tensor, int, float, str, type(None))) else type(x).__name__
        )
        return visit.leave(x) if visit.of_tokens(x) else x

    return tree_map(back, output)
