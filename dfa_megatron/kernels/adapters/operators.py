"""Operators with internal schemas, called by argument name, so that a changed one is refused at set-up, not misread."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package whose module registers operators with PyTorch when it is imported.

    Args:
        name: of the distribution, as pip knows it.
        module: what to import.
        works: the versions whose source was read, in words.
    """

    name: str
    module: str
    works: str

    @property
    def version(self) -> str:
        """Return the installed version, "of unknown version" for a copy without metadata."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"

    def refusal(self) -> str | None:
        """Return why the module cannot be imported, or None."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if (error.name or "") in {self.module.rpartition(".")[0], self.module.partition(".")[0], self.module}:
                return f"{self.name} is not installed"
            return self._broken(error)
        except Exception as error:  # noqa: BLE001 -- compiled code is loaded at import, and fails in many ways
            return self._broken(error)
        return None

    def _broken(self, error: Exception) -> str:
        return f"{self.name} {self.version} cannot be imported ({type(error).__name__}: {error})"


class Operator:
    """One operator whose arguments and leading results its caller knows by name.

    `name` is "namespace::operator"; `arguments` are the names the caller passes, and "new|old" names one that was
    renamed; `package` brings the operator, None is PyTorch itself. Nothing is looked up before `refusal` or the first
    call.
    """

    def __init__(self, name: str, arguments: tuple[str, ...], results: int, package: Package | None = None) -> None:
        self.name, self.arguments, self.results, self.package = name, arguments, results, package

    def refusal(self) -> str | None:
        """Return why the operator cannot be called with these arguments, with the version found, or None."""
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
        if self.package is not None and (why := self.package.refusal()):
            return why
        if self.package is None:
            version, hint = f"PyTorch {torch.__version__}", ""
        else:
            version, hint = f"{self.package.name} {self.package.version}", f"; it works with {self.package.works}"
        namespace, name = self.name.split("::")
        try:
            overload = getattr(getattr(torch.ops, namespace), name).default
        except AttributeError:
            return f"{version} has no operator {self.name}{hint}"
        spelling = self._spelling(overload._schema)
        if isinstance(spelling, str):
            return f"{self.name} of {version} {spelling}: {overload._schema}{hint}"
        return overload, spelling

    def _spelling(self, schema: Any) -> dict[str, str] | str:
        """Return the schema's spelling of each argument, or the error in it."""
        required = {a.name for a in schema.arguments if not a.has_default_value()}
        present = {a.name for a in schema.arguments}
        spelling: dict[str, str] = {}
        for names in self.arguments:
            spelt = next((name for name in names.split("|") if name in present), None)
            if spelt is None:
                return f"has no argument {names.replace('|', ' or ')}"
            spelling[names.split("|")[0]] = spelt
        if unknown := required - set(spelling.values()):
            return f"needs {', '.join(sorted(unknown))}, not known here"
        if len(schema.returns) < self.results:
            return "returns too little"
        return spelling
