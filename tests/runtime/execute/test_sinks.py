"""Attention sinks where no draw of tests.fuzz has them: rows that see nothing, the module, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.errors import DisagreementError, UnsupportedError
from tests.support.arguments import arguments
from tests.support.attend import case
from tests.support.close import assert_close
from tests.support.workers import over_ranks


def test_a_row_that_sees_nothing_gives_all_its_probability_to_the_sink() -> None:
    from dfa_megatron.runtime.execute.sinks import merge_sinks, sinks_gradient

    out, lse = torch.zeros(1, 3, 2, 4), torch.full((1, 2, 3), -math.inf)
    out[0, 2], lse[0, :, 2] = 1.0, 0.5
    sinks = torch.tensor([0.5, -math.inf])
    merged, merged_lse = merge_sinks(out.clone(), lse, sinks)
    assert merged[0, :2].eq(0).all()
    assert merged[0, 2].tolist() == [[0.5] * 4, [1.0] * 4]
    torch.testing.assert_close(merged_lse[0, 0], torch.tensor([0.5, 0.5, 0.5 + math.log(2)]))
    assert torch.equal(merged_lse[0, 1], lse[0, 1]), "a sink of -inf is none"
    gradient = sinks_gradient(torch.ones_like(out), merged, merged_lse, sinks)
    torch.testing.assert_close(gradient, torch.tensor([-0.5 * 2.0, 0.0]))


@over_ranks(2)
def test_wrong_sinks_are_an_error_on_every_rank(rank: int, ranks: int) -> None:
    given = case(4, with_sinks=True, seed=rank)
    sinks = given.sinks
    assert sinks is not None

    def attend(**options: Any) -> None:
        dfa_megatron.dist_flash_attn_func(*given.inputs, **arguments(**options))

    with pytest.raises(UnsupportedError, match=r"sinks \(3,\).*one number for each of 4 query heads"):
        attend(sinks=sinks[:3])
    with pytest.raises(UnsupportedError, match="a floating tensor"):
        attend(sinks=torch.ones(4, dtype=torch.int64), schedule="ring")
    with pytest.raises(DisagreementError, match=r"request\.sinks"):
        attend(sinks=sinks if rank else None, schedule="balanced")
    with pytest.raises(DisagreementError if rank else UnsupportedError, match="sinks"):
        attend(sinks=sinks if rank else sinks[:2], schedule="balanced_shared")


def test_the_module_takes_sinks_when_it_is_called() -> None:
    whole = case(6, seed=1, with_sinks=True)
    found = dfa_megatron.DistFlashAttention(causal=True)(*whole.inputs, sinks=whole.sinks)
    assert_close(found, whole.out, tolerance=1e-12)
