"""PyTorch's internal operators, called by argument name, so that a changed schema is refused at set-up, not misread."""

from __future__ import annotations

import functools
from typing import Any

import torch


class AtenOperator:
    """One `aten` operator whose arguments and leading results its caller knows by name.

    `arguments` are the names the caller passes; "new|old" names one that PyTorch has renamed. Nothing is looked up
    before `refusal` or the first call.
    """

    def __init__(self, name: str, arguments: tuple[str, ...], results: int) -> None:
        self.name, self.arguments, self.results = name, arguments, results

    def refusal(self) -> str | None:
        """Why the operator cannot be called as its caller knows it, with the PyTorch version found, or None."""
        found = self._found
        return found if isinstance(found, str) else None

    def __call__(self, **values: Any) -> Any:
        """Call with every name of `arguments` (the first of its spellings); returns the operator's results."""
        found = self._found
        if isinstance(found, str):
            raise RuntimeError(found)
        overload, spelling = found
        return overload(**{spelling[name]: value for name, value in values.items()})

    @functools.cached_property
    def _found(self) -> tuple[Any, dict[str, str]] | str:
        version = f"PyTorch {torch.__version__}"
        try:
            overload = getattr(torch.ops.aten, self.name).default
        except AttributeError:
            return f"{version} has no operator aten::{self.name}"
        schema = overload._schema
        required = {a.name for a in schema.arguments if not a.has_default_value()}
        present = {a.name for a in schema.arguments}
        spelling: dict[str, str] = {}
        for names in self.arguments:
            spelt = next((name for name in names.split("|") if name in present), None)
            if spelt is None:
                return f"aten::{self.name} of {version} has no argument {names.replace('|', ' or ')}: {schema}"
            spelling[names.split("|")[0]] = spelt
        if unknown := required - set(spelling.values()):
            return f"aten::{self.name} of {version} needs {', '.join(sorted(unknown))}, not known here: {schema}"
        if len(schema.returns) < self.results:
            return f"aten::{self.name} of {version} returns too little: {schema}"
        return overload, spelling
