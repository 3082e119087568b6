"""Check each call of a language model. In layout `boundary`, also bring its tokens into order and its losses back.

What a call gives of every token (ids, positions, labels, masks) comes in by one all-to-all of integers, on each
pipeline stage that gets it. The losses of tokens go back by one of floats. Without labels hidden states go back, before
the output layer: logits never travel. So layers, prediction layers, experts and losses know one order.

`with_door` stands in the place of LanguageModule.__init__, which gives each model its door.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.layers.context import AttentionContext, context_of
from dfa_megatron.megatron.layers.layer import DistributedLayer, hide_flags
from dfa_megatron.megatron.layers.replay import replaying, replays_of
from dfa_megatron.megatron.layers.rotary import order_rotary
from dfa_megatron.megatron.layers.router import weigh_losses
from dfa_megatron.megatron.layers.swapped import Holder, check_groups, check_size, group_holders
from dfa_megatron.megatron.output import deferring, tile_of
from dfa_megatron.megatron.overlap import run_within
from dfa_megatron.megatron.tokens.cuts import check_described, check_positions
from dfa_megatron.megatron.tokens.visit import Visit, running
from dfa_megatron.runtime.comm.compared import telling
from dfa_megatron.runtime.comm.weights import check_weights

_FOUND = "_dfa_found"
"""The attribute of a model with what its first call found."""
_KEEPS_MASKS = importlib.util.find_spec("megatron.core.recompute") is not None
"""Whether Megatron's recomputation hands the padding mask to every layer, as since 0.19, where it has this module."""

ForwardMethod = Callable[..., Any]


@dataclass
class _Found:
    """Hold what the first call of a model finds in it."""

    context: AttentionContext | None
    layers: list[DistributedLayer]
    has_others: bool
    """A layer has an attention that assumes another order of the tokens."""
    holders: list[Holder]
    replays: list[Any]
    """The replays of its routers, where tokens change their order."""
    group: Any
    """The context-parallel group of the latest call; None before the first."""
    tile: int | None = None
    """The tokens of a tile of the loss."""


def with_door(megatrons: Callable[..., None]) -> Callable[..., None]:
    """Give every language model that is built from now on a door, in LanguageModule.__init__."""

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        megatrons(self, *args, **kwargs)
        # Not by hooks: Megatron's FSDP calls forward itself.
        base: Any = type(self)
        self.forward = MethodType(_forward_of(base), self)
        if hasattr(base, "build_schedule_plan"):
            self.build_schedule_plan = MethodType(_planning(base), self)

    return build


@functools.cache
def _planning(base: Any) -> ForwardMethod:
    @functools.wraps(base.build_schedule_plan)
    def build_schedule_plan(model: Any, *args: Any, **kwargs: Any) -> Any:
        megatrons = type(model).build_schedule_plan
        if (found := _found_of(model)).context is None:
            return megatrons(model, *args, **kwargs)
        given = inspect.signature(functools.partial(megatrons, model)).bind(*args, **kwargs).arguments
        visit, inside, leave = _checked_visit(model, found, given), given, None
        if visit is not None and visit.moves:
            if _at_end(model, "last") and (given.get("labels") is None or given.get("output_processor") is not None):
                raise UnsupportedError(
                    "overlap_moe_expert_parallel_comm without labels in data_layout='boundary'",
                    "the loss alone goes back into the caller's order there",
                    "labels; or data_layout='contiguous'",
                )
            inside, leave = _entering(visit, given), functools.partial(tree_map, functools.partial(_result, visit))
        plan = megatrons(model, **inside)
        run_within(plan, visit, functools.partial(deferring, model, found.tile, given), leave)
        return plan

    return build_schedule_plan


def _found_of(model: Any) -> _Found:
    """Return what the first call of a model finds in it."""
    if _FOUND not in vars(model):
        looked = _look(model)
        if looked.context is not None and looked.context.options.verify == "on":
            check_weights(model, model.cp_group)
        looked.tile = tile_of(model)
        vars(model)[_FOUND] = looked
    return vars(model)[_FOUND]  # type: ignore[no-any-return]


@functools.cache
def _forward_of(base: Any) -> ForwardMethod:
    @functools.wraps(base.forward)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        cls: Any = type(model)
        run = functools.partial(cls.forward, model)
        found = _found_of(model)
        names = _names(cls, cls.forward)[: len(args)]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        with deferring(model, found.tile, given):
            if found.context is None:
                with running(None):  # not even within the call of a distributed model
                    return run(*args, **kwargs)
            if len(names) < len(args):
                raise UnsupportedError(
                    f"arguments by place of {cls.__name__}.forward",
                    "it does not name them, and those of tokens must change their order",
                    "arguments by name",
                )
            visit = _checked_visit(model, found, given)
            with running(visit):
                if visit is None or not visit.moves:
                    return run(*args, **kwargs)
                return _moved(visit, run, given, found.replays)

    return forward


def _checked_visit(model: Any, found: _Found, given: dict[str, Any]) -> Visit | None:
    """Return what a call needs to know, None where one rank has a sequence without documents."""
    context = found.context
    assert context is not None
    for name in ("inference_context", "inference_params"):  # Megatron's older name
        if given.get(name) is not None:
            raise UnsupportedError(
                f"{name} in a distributed model",
                "a rank would cache the keys and states of its own tokens only",
                "evaluation forwards of whole sequences over the ranks; or inference in a job of its own with "
                "--context-parallel-size 1, where Megatron's own attention loads the checkpoint",
            )
    _follow_groups(model, found, context)
    rows = _rows(model, given)
    if given.get("packed_seq_params") is None:
        with telling(model.cp_group, context.options):
            check_described(given.values(), model.cp_group, rows[1])
    visit = context.visit(model, given.get("packed_seq_params"), model.cp_group, rows)
    if visit is not None:
        _check_positions(context, given.get("position_ids"), rows[1], visit)
    if given.get("padding_mask") is not None and _loses_masks(model, context):
        raise UnsupportedError(
            "padding_mask beside experts with --recompute-method block and --dfa-checkpoint none",
            "Megatron's own recomputation loses the mask of the layers that it does not recompute",
            "--recompute-method uniform, or --dfa-checkpoint auto",
        )
    layout = context.options.data_layout
    shared = visit is not None and visit.group.size() > 1 and (layout != "zigzag" or visit.offsets)
    if found.has_others and visit is not None and (shared or visit.pairs is not None):
        raise UnsupportedError(
            f"a layer with Megatron's own attention in a distributed model, in layout {layout!r}",
            "it assumes Megatron's zigzag order of the tokens, of every document in a pack",
            "distribute_attention for the spec of every layer, those of multi-token prediction too",
        )
    return visit


def _look(model: Any) -> _Found:
    """Look at the modules of a model, and prepare those around distributed layers."""
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    context, has_others = context_of(model), False
    layers = [module for module in model.modules() if isinstance(module, DistributedLayer)]
    if context is None:
        return _Found(None, [], has_others=False, holders=[], replays=[], group=None)
    if getattr(model, "rotary_pos_emb", None) is not None:
        order_rotary(model)
    took_over = {layer for layer in layers if layer._dfa_took_over}
    for module in model.modules():
        if isinstance(module, DistributedLayer):
            has_others |= module._dfa.options.layout_inside != context.options.layout_inside
        elif isinstance(module, TransformerLayer):
            has_others |= isinstance(module.self_attention, Attention)
        elif isinstance(module, TransformerBlock) and context.options.data_layout == "boundary":
            module.register_forward_pre_hook(_check_extracted, with_kwargs=True)  # their order would be mistaken
        around = module is not model and not took_over.isdisjoint({*module.modules()} - {module})
        if around and "config" in vars(module):
            hide_flags(module)
    replays = replays_of(model) if context.options.data_layout == "boundary" else []
    return _Found(context, layers, has_others, group_holders(model), replays, None)


def _follow_groups(model: Any, found: _Found, context: AttentionContext) -> None:
    """Follow the groups of this call, which a trainer may have swapped since the last."""
    group = model.cp_group
    if found.group is not group:
        check_size(model.config, group)
        check_config(model.config, context.options)
        for layer in found.layers if group.size() > 1 else ():
            weigh_losses(layer)
        found.group = group
    check_groups(found.holders, group, found.layers[0]._dfa_state if found.layers else None)


def _check_extracted(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _check_extra([name for name in ("extract_layer_indices",) if kwargs.get(name)])


def _check_extra(names: list[str]) -> None:
    if names:
        raise UnsupportedError(
            f"the block's argument {', '.join(names)} in data_layout='boundary'",
            "the tokens between layers are in another order than the caller's",
            "data_layout='contiguous' with batches of shard_batch, or 'zigzag'",
        )


def _loses_masks(model: Any, context: AttentionContext) -> bool:
    """Return whether Megatron recomputes only some layers, itself, and would leave out the padding mask of others."""
    config = model.config
    if context.options.saves_attention or not config.num_moe_experts or config.recompute_granularity != "full":
        return False
    some = config.recompute_method == "block" and config.recompute_num_layers < len(model.decoder.layers)
    return some and not _KEEPS_MASKS


@functools.cache
def _names(model: Any, forward: ForwardMethod) -> list[str]:
    """Return the names of the arguments that a model's class takes by place, from the first class that says them.

    forward: its method, which someone may have replaced since the last call.
    """
    for base in model.__mro__:
        parameters = inspect.signature(vars(base)["forward"]).parameters.values() if "forward" in vars(base) else ()
        if parameters and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    return []


def _rows(model: Any, given: dict[str, Any]) -> tuple[int, int]:
    """Return the batch and the tokens of this rank."""
    for name in ("input_ids", "labels", "position_ids", "loss_mask", "padding_mask"):
        x = given.get(name)
        if isinstance(x, torch.Tensor) and x.dim() == 2:
            return x.shape[0], x.shape[1]
    states: Any = given.get("decoder_input")
    states = model.decoder.input_tensor if states is None else states
    return states.shape[1], states.shape[0] * (model.pg_collection.tp.size() if model.config.sequence_parallel else 1)


def _check_positions(context: AttentionContext, positions: Any, tokens: int, visit: Visit) -> None:
    """Refuse the positions of an uncut batch; those on a device once for each length, as the host must wait.

    A pack counts its positions in documents, and those of multimodal rotary embeddings stay whole.
    """
    if positions is None or positions.dim() == 3 or visit.pack is not None:
        return
    if positions.device.type == "cpu" or (visit.group, tokens) not in context.lengths:
        context.lengths.add((visit.group, tokens))
        check_positions(visit.group, context.options.data_layout, positions)


def _moved(visit: Visit, run: ForwardMethod, given: dict[str, Any], replays: list[Any]) -> Any:
    """Run a model on tokens in its own order, and return its result in the caller's."""
    model, labelled, hook = visit.model, given.get("labels") is not None, None
    inside = _entering(visit, given)
    if (processor := given.get("output_processor")) is not None:
        inside["output_processor"] = functools.partial(_process, visit, processor, given)
    elif model.post_process and not labelled:
        hook = model.output_layer.register_forward_pre_hook(functools.partial(_output, visit), with_kwargs=True)
    try:
        with replaying(visit, replays):
            output = run(**inside)
    finally:
        if hook is not None:
            hook.remove()
    if not model.post_process:
        return visit.hidden(output, back=True) if _at_end(model, "last") else output
    if processor is not None or not labelled:
        if hook is not None and not visit.outputs:
            raise UnsupportedError(
                "a model without labels that did not call its output layer, in data_layout='boundary'",
                "hidden states go back into the caller's order before that layer",
                "labels, post_process=False, or data_layout='contiguous'",
            )
        return output
    return tree_map(functools.partial(_result, visit), output)


def _entering(visit: Visit, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with its tokens in the model's own order."""
    model, more = visit.model, (given.get("extra_block_kwargs") or {}).items()
    _check_extra([name for name, x in more if not isinstance(x, (int, float, str, type(None)))])
    inside = {**given, **visit.enter({name: x for name, x in given.items() if visit.of_tokens(x)})}
    if (embedded := given.get("decoder_input")) is not None:
        inside["decoder_input"] = visit.hidden(embedded, back=False)
    elif not model.pre_process and _at_end(model, "first"):
        model.set_input_tensor(visit.hidden(model.decoder.input_tensor, back=False))
    return inside


def _at_end(model: Any, end: str) -> bool:
    """Return whether a model is the "first", or the "last", stage of its pipeline."""
    from megatron.core.pipeline_parallel import utils

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


def _process(
    visit: Visit, processor: Callable[..., Any], outside: dict[str, Any], *, hidden_states: Any, **asked: Any
) -> Any:
    """Call the caller's own output processor with everything in the caller's order."""
    known = {name: x for name, x in outside.items() if name in asked and x is not None}
    if "decoder_input" not in known and asked.get("decoder_input") is not None:
        known["decoder_input"] = visit.hidden(asked["decoder_input"], back=True)
    return processor(hidden_states=visit.hidden(hidden_states, back=True), **{**asked, **known})


def _result(visit: Visit, x: Any) -> Any:
    """Return a part of what a model returns in the caller's order."""
    if not isinstance(x, (torch.Tensor, float, str, type(None))):
        raise UnsupportedError(
            f"a language model that returns {type(x).__name__} in data_layout='boundary'",
            "its tensors of tokens would stay in the order of the layers",
            "tensors, or tuples and dictionaries of such; or data_layout='contiguous'",
        )
    return visit.leave(x) if isinstance(x, torch.Tensor) and visit.of_tokens(x) else x
