"""Uninitialised memory is NaN inside, and what it was outside."""

from __future__ import annotations

import pytest
import torch

from tests.support import nan_memory as memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_memory_is_nan_inside_and_outside_nothing_is_changed(dtype: torch.dtype) -> None:
    before = [getattr(owner, name) for owner, name in memory.ALLOCATORS]
    x = torch.zeros(3, 4, dtype=dtype)
    with memory.nan_memory():
        made = (
            torch.empty(3, 4, dtype=dtype), torch.empty_like(x), torch.empty_strided((3, 4), (8, 1), dtype=dtype),
            x.new_empty(3, 4), x.new_empty_strided((3, 4), (1, 3)),
        )  # fmt: skip
        assert all(one.float().isnan().all() for one in made)
        assert torch.empty(8, dtype=torch.uint8).view(torch.float32).isnan().all()
        assert torch.empty(4, dtype=torch.int64).eq(-1).all()
        assert torch.empty(4, dtype=torch.bool).all()
        assert torch.empty(2, requires_grad=True).isnan().all()
        assert torch.empty(2, device="meta").is_meta
        assert torch.empty(0).numel() == 0
    with pytest.raises(ZeroDivisionError), memory.nan_memory():
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in memory.ALLOCATORS] == before
