"""What no result shows: bounds and switches that a fault may drop while every number stays right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import kernels
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.runtime import prepare
from tests.support.arguments import arguments
from tests.support.workers import over_ranks


def test_a_process_keeps_a_bounded_number_of_prepared_attentions() -> None:
    q = torch.randn(1, 4, 1, 8)
    for call in range(prepare._KEPT + 6):
        dfa_megatron.dist_flash_attn_func(q, q, q, causal=True, softmax_scale=1.0 + call)
        if call > 3:  # used again and again, so that it stays
            dfa_megatron.dist_flash_attn_func(q, q, q, causal=True, softmax_scale=1.0 + 3)
    kept = [prepared.request.softmax_scale for prepared in prepare._ALONE.values()]
    assert len(kept) == prepare._KEPT
    assert set(kept) == {4.0, *(1.0 + call for call in range(7, prepare._KEPT + 6))}


@over_ranks(2, timeout=60)
def test_the_kernel_hears_that_gradients_are_to_be_deterministic(rank: int, ranks: int) -> None:
    """By the way of asking: the values that a kernel was chosen for, and those that its backward was given."""
    chosen, given = set[bool](), set[bool]()
    kernel: Any = type(kernels.get("reference"))
    refusal, backward = kernel.refusal, kernel.backward

    def refused(self: object, need: Any) -> str | None:
        chosen.add(need.deterministic)
        return refusal(self, need)  # type: ignore[no-any-return]

    def computed(self: object, call: Any, *results: Any) -> Any:
        given.add(call.deterministic)
        return backward(self, call, *results)

    def told(attend: Any, local: int, *documents: Any, **options: Any) -> tuple[set[bool], set[bool]]:
        chosen.clear(), given.clear()
        shape = (local, 4, 8) if documents else (1, local, 4, 8)
        q = torch.randn(shape, requires_grad=True)
        attend(q, q, q, *documents, **options).sum().backward()
        return set(chosen), set(given)

    def plain(*qkv: torch.Tensor, **options: Any) -> Any:
        return dfa_megatron.dist_flash_attn_func(*qkv, **arguments(kernel="reference", **options))

    def packs(*given: Any, **options: Any) -> Any:
        return dfa_megatron.dist_flash_attn_varlen_func(*given, **arguments(kernel="reference", **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "refusal", refused)
        patch.setattr(kernel, "backward", computed)
        assert told(plain, 6) == ({False}, {False}), "not asked"
        module = dfa_megatron.DistFlashAttention(causal=True, config=DistAttentionConfig(kernel="reference"))
        torch.use_deterministic_algorithms(True)
        for found in (
            told(plain, 6),
            told(packs, 6, (0, 5, 6 * ranks)),
            told(module, 10),
            told(plain, 6, ulysses_degree=ranks),
        ):
            assert found == ({True}, {True})
        torch.use_deterministic_algorithms(False)
