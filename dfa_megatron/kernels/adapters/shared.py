"""The common ground of adapters: refusals, memory layouts, determinism for one call, and operators by argument name.

Operators have internal schemas. They are called by argument name, so a changed one is refused at set-up, not misread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from dfa_megatron.kernels import Need

_VECTOR_BYTES = 16


def gpu_refusal(need: Need) -> str | None:
    """Return why no kernel of PyTorch's CUDA build serves the need, or None."""
    if torch.device(need.device).type != "cuda":
        return f"it runs on CUDA, not on {need.device}"
    if need.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, not {need.dtype}"
    if need.head_dim % 8 or need.head_dim_v % 8:
        return f"head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) must be multiples of 8"
    if need.capability is None or need.capability < (8, 0):
        return f"it needs compute capability 8.0 (Ampere) or newer, not {capability_text(need)}"
    return None


def equal_dims_refusal(need: Need) -> str | None:
    """Return `gpu_refusal`, or why a kernel with one head_dim, 256 at most, cannot serve the need, or None."""
    if why := gpu_refusal(need):
        return why
    if need.head_dim != need.head_dim_v:
        return f"it needs head_dim ({need.head_dim}) and head_dim_v ({need.head_dim_v}) to be equal"
    return f"head_dim {need.head_dim} is over 256" if need.head_dim > 256 else None


def build_refusal() -> str | None:
    """Return why this PyTorch has no CUDA kernels, or None."""
    return None if torch.version.cuda else f"PyTorch {torch.__version__} is built without CUDA"


def capability_text(need: Need) -> str:
    """Return the compute capability as people write it."""
    return "an unknown one" if need.capability is None else "{}.{}".format(*need.capability)


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x or a copy: contiguous, 16-byte aligned, and with the strides of a fresh tensor of its shape.

    A contiguous tensor may have any stride in a dimension of size 1; a kernel that sorts or compares strides minds it.
    """
    if not x.is_contiguous() or x.data_ptr() % _VECTOR_BYTES:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(-1).view(x.shape)


def vectorised(x: torch.Tensor) -> torch.Tensor:
    """Return x with its strides, or a contiguous copy where 16-byte loads of its rows are not possible."""
    *outer, last = x.stride()
    if last == 1 and x.data_ptr() % _VECTOR_BYTES == 0:
        per_vector = _VECTOR_BYTES // x.element_size()
        for stride in outer:
            if stride % per_vector:
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Ask PyTorch's operators for their deterministic algorithm inside, and leave its settings as they were.

    The settings belong to the process: another thread may run deterministically meanwhile, which is slower, not wrong.
    """
    before = torch.get_deterministic_debug_mode()
    if not wanted or before == 2:
        yield
        return
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        settings.fill_uninitialized_memory = fill


class Operator:
    """One operator whose arguments and leading results its caller knows by name.

    `name` is "namespace::operator"; `arguments` are the names the caller passes, and "new|old" names one that was
    renamed. Nothing is looked up before `refusal` or the first call.
    """

    def __init__(self, name: str, arguments: tuple[str, ...], results: int) -> None:
        self.name, self.arguments, self.results = name, arguments, results

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
        version = f"PyTorch {torch.__version__}"
        namespace, name = self.name.split("::")
        try:
            overload = getattr(getattr(torch.ops, namespace), name).default
        except AttributeError:
            return f"{version} has no operator {self.name}"
        spelling = self._spelling(overload._schema)
        if isinstance(spelling, str):
            return f"{self.name} of {version} {spelling}: {overload._schema}"
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
