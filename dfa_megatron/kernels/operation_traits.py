"""What recording a run asks of an operation of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten


class Traits(NamedTuple):
    """Traits of an operation.

    follows_values: the host learns from values. is_view: its result is one. is_empty, is_zeros: it allocates. fast: the
    same without the Python code of `torch.ops`.
    """

    follows_values: bool
    is_view: bool
    is_empty: bool
    is_zeros: bool
    fast: Callable[..., Any]


def traits_of(func: Any) -> Traits:
    """Return the traits of an operator overload, such as `torch.ops.aten.add.Tensor`."""
    returned = func._schema.returns
    is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
    follows_values = bool(_FOLLOWS_VALUES.intersection(func.tags))
    return Traits(follows_values, is_view, func in _EMPTY, func in _ZEROS, _FAST.get(func, func))


_FOLLOWS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's marks of operations whose result or shape the host learns from values."""
_EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
_FAST: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: torch.Tensor.copy_,
    aten.zero_.default: torch.Tensor.zero_,
    aten.fill_.Scalar: torch.Tensor.fill_,
    aten.neg.default: torch.neg,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.clone.default: torch.clone,
}
