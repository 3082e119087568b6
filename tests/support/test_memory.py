"""Uninitialised memory is NaN inside, and what it was outside."""

from __future__ import annotations

import pytest
import torch

from tests.support import nan_memory as memory

ALLOCATIONS = {
    "empty": lambda dtype: torch.empty(3, 4, dtype=dtype),
    "empty_like": lambda dtype: torch.empty_like(torch.zeros(3, 4, dtype=dtype)),
    "empty_strided": lambda dtype: torch.empty_strided((3, 4), (8, 1), dtype=dtype),
    "new_empty": lambda dtype: torch.zeros(1, dtype=dtype).new_empty(3, 4),
    "new_empty_strided": lambda dtype: torch.zeros(1, dtype=dtype).new_empty_strided((3, 4), (1, 3)),
}


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_floating_memory_is_nan(allocate: object, dtype: torch.dtype) -> None:
    assert allocate(dtype).float().isnan().all()  # type: ignore[operator]


@pytest.mark.usefixtures("nan_memory")
def test_other_memory_is_all_ones() -> None:
    assert torch.empty(4, dtype=torch.uint8).eq(255).all()
    assert torch.empty(4, dtype=torch.int64).eq(-1).all()
    assert torch.empty(4, dtype=torch.bool).all()
    assert torch.empty(8, dtype=torch.uint8).view(torch.float32).isnan().all()


@pytest.mark.usefixtures("nan_memory")
def test_parameters_and_tensors_without_memory_are_allowed() -> None:
    assert torch.empty(2, requires_grad=True).isnan().all()
    assert torch.empty(2, device="meta").is_meta
    assert torch.empty(0).numel() == 0


def test_outside_nothing_is_changed() -> None:
    before = [getattr(owner, name) for owner, name in memory.ALLOCATORS]
    with memory.nan_memory():
        assert torch.empty(1).isnan()
    with pytest.raises(ZeroDivisionError), memory.nan_memory():
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in memory.ALLOCATORS] == before
