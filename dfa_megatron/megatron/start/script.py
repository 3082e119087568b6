"""Prepare this process for a Megatron script: add the `--dfa-*` flags to its parser, slice its batches in order.

These names are replaced once, each only if it exists with the signature that is known here:

- megatron.training.arguments.add_megatron_arguments, which every version of `parse_args` looks up at call time;
- for layout contiguous, megatron.core.utils.get_batch_on_this_cp_rank and, for packed documents up to 0.17,
  get_thd_batch_on_this_cp_rank, and every Megatron module that has imported them;
- for layout contiguous, the constructor of Megatron's SFTDataset, which would pad every document to 2 x CP tokens;
- for layout contiguous, the constructor of Megatron's TransformerLayer, which then refuses layers that are not ours;
- for layout contiguous, get_gpt_mtp_block_spec, whose prediction layers scripts make from Megatron's default spec.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.refusals import BATCHES, LAUNCH
from dfa_megatron.megatron.start.dfa_flags import add_dfa_arguments
from dfa_megatron.megatron.tokens.batch import shard_batch, slices_scripts
from dfa_megatron.megatron.tokens.others import refuse_other_layers
from dfa_megatron.megatron.tokens.packed_documents import packed_seq_params
from dfa_megatron.megatron.versions import say_if_not_tried, version

logger = logging.getLogger("dfa_megatron.megatron")

_MARK = "_dfa_megatron"
"""Set on a function that stands in for one of Megatron's, so that a second call replaces nothing."""

_SLICE = "get_batch_on_this_cp_rank"
_SLICE_PACKED = "get_thd_batch_on_this_cp_rank"
_SLICE_PARAMETERS = {
    "batch",
    "cp_group",
    "is_hybrid_cp",
    "hybrid_cp_group_func",
    "use_per_sequence_balancing",
}
"""What Megatron's function took in 0.16 (the first two) to 0.19; another argument must keep its default."""


def prepare(flags: Sequence[str]) -> DistAttentionConfig:
    """Put our flags into Megatron's parser, and our slicing into its scripts where the flags say `contiguous`.

    Args:
        flags: the script's arguments. With -h or --help nothing is refused: the script prints its help.

    Returns:
        The options in the flags.

    Raises:
        UnsupportedError: flags that would be silently wrong, or a Megatron without the replaced names.
        SystemExit: a --dfa flag with an invalid value, as in argparse.
    """
    args = _known(flags)
    options = DistAttentionConfig.from_args(args)
    if not {"-h", "--help"} & set(flags):
        LAUNCH.check(args, launched=True)
    _add_flags()
    if options.data_layout == "contiguous":
        _slice_in_order(options)
        _leave_documents_unpadded()
        refuse_other_layers()
        _distribute_predictions(options)
    say_if_not_tried()
    return options


def _known(flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dfa_megatron.launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--spec", nargs="*")
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--use-legacy-models", action="store_true")
    return add_dfa_arguments(parser).parse_known_args(list(flags))[0]


def _named(module_name: str, name: str) -> tuple[Any, Callable[..., Any]]:
    """Return a Megatron module and its function of that name."""
    where = f"{module_name}.{name} of Megatron-Core {version()}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise ImportError(f"{module_name} of Megatron-Core {version()} cannot be imported: {error}") from error
        LAUNCH.check(missing_module=(where, error.name))
    function: Any = getattr(module, name, None)
    LAUNCH.check(missing_function=None if callable(function) else where)
    return module, function


def _add_flags() -> None:
    module, add_megatron_arguments = _named("megatron.training.arguments", "add_megatron_arguments")
    if hasattr(add_megatron_arguments, _MARK):
        return

    @functools.wraps(add_megatron_arguments)
    def with_dfa_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return _with_printable_help(add_dfa_arguments(add_megatron_arguments(parser)))

    setattr(with_dfa_arguments, _MARK, add_megatron_arguments)
    module.add_megatron_arguments = with_dfa_arguments


def _with_printable_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape a bare % in a help text of Megatron-Core 0.18 and 0.19, which makes --help fail in argparse."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help:
            try:
                formatter._expand_help(action)
            except (KeyError, TypeError, ValueError):
                action.help = action.help.replace("%", "%%")
    return parser


def _slice_in_order(options: DistAttentionConfig) -> None:
    _, megatrons = _named("megatron.core.utils", _SLICE)
    if hasattr(megatrons, _MARK):
        return
    signature = inspect.signature(megatrons)
    if next(iter(signature.parameters)) != "batch" or "cp_group" not in signature.parameters:
        LAUNCH.check(unknown_signature=f"{_SLICE}{signature} of Megatron-Core {version()}")

    @functools.wraps(megatrons)
    def sliced_in_order(*args: Any, **kwargs: Any) -> Any:
        return slice_in_order(options, signature, *args, **kwargs)

    _replace(_SLICE, megatrons, sliced_in_order)
    of_packs = getattr(sys.modules["megatron.core.utils"], _SLICE_PACKED, None)
    if of_packs is None:  # since 0.18 the function above slices packs too
        return

    @functools.wraps(of_packs)
    def packs_sliced_in_order(
        batch: dict[str, Any],
        cu_seqlens: torch.Tensor,
        cu_seqlens_padded: torch.Tensor | None,
        max_seqlen: torch.Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], Any]:
        from megatron.core import parallel_state

        group = parallel_state.get_context_parallel_group()
        if cp_size not in (None, group.size()) or cp_rank not in (None, group.rank()):
            BATCHES.check(part_of_group=f"rank {cp_rank} of {cp_size}")
        documents = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
        local = shard_batch({**batch, **documents}, group, options)
        batch.update({name: local[name] for name in batch})
        return batch, packed_seq_params(local)

    _replace(_SLICE_PACKED, of_packs, packs_sliced_in_order)


def _distribute_predictions(options: DistAttentionConfig) -> None:
    name = "get_gpt_mtp_block_spec"
    _, megatrons = _named("megatron.core.models.gpt.gpt_layer_specs", name)
    if hasattr(megatrons, _MARK):
        return

    @functools.wraps(megatrons)
    def distributed(config: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        from dfa_megatron.megatron.spec import distribute_attention

        # A block, because Megatron accepts a layer spec only if its class is exactly TransformerLayer.
        layers = spec.layer_specs[-1:] if isinstance(spec, TransformerBlockSubmodules) else [spec]
        block = TransformerBlockSubmodules(layer_specs=layers)
        return megatrons(config, distribute_attention(block, config, config=options), *args, **kwargs)

    _replace(name, megatrons, distributed)


def _replace(name: str, megatrons: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Replace Megatron's function with ours in every Megatron module that has it."""
    setattr(ours, _MARK, megatrons)
    for where, module in list(sys.modules.items()):
        if where.split(".")[0] == "megatron" and getattr(module, "__dict__", {}).get(name) is megatrons:
            setattr(module, name, ours)


def _leave_documents_unpadded() -> None:
    """Make Megatron's --sft build the same samples as without context parallelism."""
    try:
        dataset = importlib.import_module("megatron.training.datasets.sft_dataset").SFTDataset
    except (ImportError, AttributeError):
        return  # a Megatron without --sft
    megatrons = dataset.__init__
    if hasattr(megatrons, _MARK):
        return
    signature = inspect.signature(megatrons)

    @functools.wraps(megatrons)
    def unpadded(*args: Any, **kwargs: Any) -> None:
        asked = signature.bind(*args, **kwargs)
        config = asked.arguments["config"]
        if getattr(config, "context_parallel_size", 1) > 1:
            asked.arguments["config"] = config = copy.copy(config)
            config.context_parallel_size = 1
            logger.info("dfa: documents are packed as they are, not padded to 2 x context-parallel-size tokens")
        megatrons(*asked.args, **asked.kwargs)

    setattr(unpadded, _MARK, megatrons)
    dataset.__init__ = unpadded


def slice_in_order(options: DistAttentionConfig, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
    """Slice a batch like Megatron's get_batch_on_this_cp_rank, in layout `contiguous`.

    Args:
        options: the model's options, with layout contiguous.
        signature: the signature of Megatron's function; args and kwargs are the arguments of this call.

    Returns:
        The given batch, changed in place as Megatron does.

    Raises:
        UnsupportedError: arguments for another slicing, or a model without distributed attention.
    """
    asked = signature.bind(*args, **kwargs)
    _check_slicing(signature, asked.arguments)
    batch = asked.arguments["batch"]
    group = _group_that_slices(batch, asked.arguments)
    if group is not None:
        batch.update(shard_batch(batch, group, options))
        slices_scripts(group)
    return batch


def _group_that_slices(batch: dict[str, Any], arguments: dict[str, Any]) -> Any:
    """Return the ranks that share a batch, None for one rank; hybrid context parallelism has a group for each size."""
    in_rows = arguments.get("use_per_sequence_balancing") or batch.get("cu_seqlens") is None
    if arguments.get("is_hybrid_cp") and not in_rows:
        if (size := int(batch["local_cp_size"])) == 1:
            return None
        batch["hybrid_cp_group"] = arguments["hybrid_cp_group_func"](group_size=size)
        return batch["hybrid_cp_group"]
    if (group := arguments.get("cp_group")) is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _check_slicing(signature: inspect.Signature, arguments: dict[str, Any]) -> None:
    from dfa_megatron.megatron.layers.layer import layer_class

    for name, value in arguments.items():
        if name not in _SLICE_PARAMETERS and value != signature.parameters[name].default:
            BATCHES.check(unknown_slicing=f"{name}={value!r}")
    BATCHES.check(no_layers=not layer_class.cache_info().currsize)
