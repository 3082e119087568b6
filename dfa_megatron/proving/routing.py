"""Replay which experts and which keys a run chose: rounding would choose others where two score nearly the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUTERS = ("Router", "Gate", "MoE", "Moe", "MoeBlock", "MoEBlock")
"""Endings of the names of classes that choose experts."""

_INDEXER = "Indexer"
"""The same of those that choose keys."""

Choices = dict[tuple[str, int], torch.Tensor]
"""int64 (tokens, ...) on the CPU, by the router and the number of its call in a forward, or by the indexer and 0."""


class _TopK(TorchDispatchMode):
    """See every top-k of a router; with `chosen`, replace what it finds."""

    def __init__(self, name: str, seen: Choices, chosen: Choices | None, places: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.seen, self.chosen, self.places, self.calls = name, seen, chosen, places, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default or found[1].numel() % len(self.places):
            return found
        key, self.calls = (self.name, self.calls), self.calls + 1
        at = found[1]
        if self.chosen is None:
            self.seen[key] = at.detach().reshape(len(self.places), -1).cpu()
            return found
        if (known := self.chosen.get(key)) is None:
            return found
        at.copy_(known[self.places].view(at.shape))
        found[0].copy_(args[0].gather(args[2] if len(args) > 2 else -1, at))
        return found


class _FirstOfEquals(TorchDispatchMode):
    """Let the top-k of an indexer take the first of equal scores, as the choice over ranks does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        found = args[0].sort(dim=-1, descending=True, stable=True)
        return tuple(x[..., : args[1]] for x in found)


def follow_keys(
    out: torch.Tensor, key: tuple[str, int], document: int, places: torch.Tensor, seen: Choices, chosen: Choices | None
) -> torch.Tensor | None:
    """Note the keys that an indexer chose; return those to replay.

    Args:
        out: (..., topk), by their place in the text, or, where there are choices to replay, in the document. -1, and
            alone a key behind its query, is none.
        document: the tokens of each. places, seen, chosen: as for `routing`.
    """
    own, found = places[:, None], out.detach().flatten(0, -2).long().cpu()
    first = own - own % document
    if chosen is None:
        seen[key] = found
        return None
    seen[key] = torch.where(found > own % document, -1, found + first)
    known = chosen[key][places]
    return (torch.where(known < 0, own, known) - first).view(*out.shape[:-1], -1).to(out)


@contextmanager
def routing(models: list[Any], places: torch.Tensor, seen: Choices, chosen: Choices | None) -> Iterator[None]:
    """Note the choices of all routers, or replay them.

    Args:
        models: those of this rank.
        places: the tokens of this rank's rows.
        seen: takes the choices of this rank's rows.
        chosen: choices for all tokens of the text, or None to choose freely.
    """
    modes: dict[torch.nn.Module, Any] = {}

    def before(module: torch.nn.Module, args: Any) -> None:
        if type(module).__name__.endswith(_INDEXER):
            modes[module] = _FirstOfEquals()  # type: ignore[no-untyped-call]
        else:
            modes[module] = _TopK(names[module], seen, chosen, places)
        modes[module].__enter__()

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if module in modes:
            modes.pop(module).__exit__(None, None, None)

    names: dict[torch.nn.Module, str] = {}
    kinds = _ROUTERS if chosen is None else (*_ROUTERS, _INDEXER)
    for number, model in enumerate(models):
        inside = ""
        for name, module in model.named_modules():
            if type(module).__name__.endswith(kinds) and not (inside and name.startswith(inside)):
                names[module], inside = f"{number}.{name}", f"{name}."
    hooks = [module.register_forward_pre_hook(before) for module in names]
    hooks += [module.register_forward_hook(after, always_call=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
