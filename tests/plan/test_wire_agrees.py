"""What the cost model counts is what the runtime puts on the wire."""

from __future__ import annotations

import pytest
import torch

from dfa_megatron.plan.language.shape import AttentionShape, bytes_of
from dfa_megatron.runtime.execute.wire_format import Format


@pytest.mark.parametrize("name", ["q", "kv", "out", "qdo", "dq", "dkv"])
@pytest.mark.parametrize("needs", ["delta", "out"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_name_has_the_bytes_of_its_fields(name: str, needs: str, dtype: torch.dtype) -> None:
    form = Format(2, 6, 3, 16, 8, dtype, needs)  # type: ignore[arg-type]
    shape = AttentionShape(2, 6, 3, 16, 8, dtype.itemsize, max(4, dtype.itemsize), needs)  # type: ignore[arg-type]
    assert sum(field.nbytes(2, 5) for field in form.fields(name)) == bytes_of(name, 5, shape)
