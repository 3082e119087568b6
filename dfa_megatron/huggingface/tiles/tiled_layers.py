"""Make norms and dense MLPs of a transformers model compute a tile of tokens at a time: `mlp_tile`."""

from __future__ import annotations

import copyreg
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.implementation import kind_of
from dfa_megatron.remat.by_tiles import by_tiles

_MLP = re.compile(r"mlp|feed_?forward|ffn|moe", re.IGNORECASE)
"""In the name of a child of a layer, or of its class."""
_NORM = re.compile(r"RMSNorm|LayerNorm")
"""In the name of a class that norms the last dimension."""


@functools.cache
def tiled_class(first: type, base: type) -> type:
    """Return the class of both, made once, for a module to get in place of its own.

    Its instances pickle by the two classes, which are found by their names; it has no name of its own.
    """
    made = type(f"Tiled{base.__name__}", (first, base), {"__module__": __name__})
    copyreg.pickle(made, _reduced)
    return made


def _reduced(module: Any) -> tuple[Any, ...]:
    return (_empty, type(module).__bases__, *module.__reduce_ex__(2)[2:])


def _empty(first: type, base: type) -> Any:
    made: Any = tiled_class(first, base)
    return made.__new__(made)


class TiledTokens:
    """Compute tile by tile; the first base of a `tiled_class`."""

    dfa_tile: int | None = None
    """Tokens of a tile; None: all at once."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on each tile of its one tensor; a call with more arguments runs whole."""
        whole, tile = super().forward, self.dfa_tile  # type: ignore[misc]
        if tile is None or len(args) != 1 or kwargs or args[0].dim() < 2 or not args[0].numel():
            return whole(*args, **kwargs)
        x: torch.Tensor = args[0]
        places = x.shape[:-1]  # (batch, tokens), perhaps with heads behind or between
        dim = places.index(max(places))
        beside = x.shape[0] if dim else x.shape[1] if x.dim() == 3 else 1
        return torch.cat(by_tiles(whole, x, max(1, tile // beside), dim=dim, random=self.training), dim)  # type: ignore[attr-defined]


def tile_layers(model: Any, options: TrainingConfig) -> None:
    """Make norms and MLPs of a model's decoder compute by tiles, or at once again for mlp_tile="off".

    Raises:
        UnsupportedError: the MLP of a layer has experts or takes more than hidden states, or no layer has an MLP.
    """
    decoder = model.get_decoder()
    if options.mlp_tile == "off":
        for module in decoder.modules():
            if isinstance(module, TiledTokens):
                module.dfa_tile = None
        return
    mlps = list(_mlps(decoder))
    other = next((type(mlp).__name__ for mlp in mlps if not _treats_each_token_alone(mlp)), None)
    if other:
        raise UnsupportedError(
            f"mlp_tile for {kind_of(model)} with an MLP of class {other}",
            "only a dense MLP of hidden states computes each token by itself; experts are chosen over all tokens",
            "mlp_tile='off'",
        )
    if not mlps:
        raise UnsupportedError(
            f"mlp_tile for {kind_of(model)}", "its layers have no MLP in a module of its own", "mlp_tile='off'"
        )
    norms = [module for module in decoder.modules() if _NORM.search(type(module).__name__)]
    for module in (*norms, *mlps):
        if not isinstance(module, TiledTokens):
            base: Any = type(module)
            module.__class__ = tiled_class(TiledTokens, base)
        module.dfa_tile = options.mlp_tile


def _mlps(decoder: Any) -> Iterator[nn.Module]:
    """Yield the children of layers that are MLPs by their name or that of their class."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in decoder.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for name, child in layer.named_children():
                named = _MLP.search(name) or _MLP.search(type(child).__name__)
                if named and not _NORM.search(type(child).__name__) and [*child.parameters()]:
                    yield child


def _treats_each_token_alone(mlp: nn.Module) -> bool:
    """Whether an MLP is made of linear layers and functions of one number, and takes hidden states alone."""
    from transformers.pytorch_utils import Conv1D

    needed = [
        each
        for each in inspect.signature(mlp.forward).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    holders = [module for module in mlp.modules() if [*module.parameters(recurse=False)]]
    dense = all(isinstance(x, (nn.Linear, Conv1D)) or _NORM.search(type(x).__name__) for x in holders)
    lists = any(isinstance(module, nn.ModuleList) for module in mlp.modules())  # experts
    return len(needed) <= 1 and dense and not lists
