"""Context parallelism together with fully sharded parameters, PyTorch's and Megatron's, trains like one rank."""

from __future__ import annotations

import pytest
import torch

from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.test_parity import FULL, check
from tests.support.workers import run_ranks

LOCAL = (("transformer_impl", "local"),)
"""FSDP2 otherwise believes that linear layers are to be sharded by themselves, inside layers that are."""


def cases(**wrapped: object) -> list[Case]:
    """Rematerialization, nothing recomputed, and Megatron's own recomputation, which runs layers again from outside."""
    return [
        case("contiguous", "auto", steps=3, config=LOCAL, **wrapped),
        case("boundary", steps=2, config=LOCAL, **wrapped),
        case("boundary", recompute=FULL, steps=2, config=LOCAL, **wrapped),
    ]


@pytest.mark.support("megatron", "PyTorch's and Megatron's fully sharded parameters (FSDP)")
def test_pytorchs_fsdp_trains_like_one_rank(reference: str) -> None:
    check(Topology(cp=2), cases(wrapper="torch_fsdp2"), reference)


@pytest.mark.support("megatron", "PyTorch's and Megatron's fully sharded parameters (FSDP)")
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
def test_megatrons_fsdp_trains_like_one_rank(strategy: str, reference: str) -> None:
    wrapped = {"wrapper": f"megatron_fsdp:{strategy}", "optimizer": "distributed", "overlap": True}
    check(Topology(cp=2), cases(**wrapped), reference)


def test_gradients_are_averaged_over_data_and_context_ranks(reference: str) -> None:
    megatrons = {"wrapper": "megatron_fsdp:optim_grads_params", "optimizer": "distributed", "overlap": True}
    both: tuple[dict[str, object], ...] = ({"wrapper": "torch_fsdp2"}, megatrons)
    wanted = [case("boundary", "auto", steps=2, config=LOCAL, **wrapped) for wrapped in both]
    check(Topology(cp=2, dp=2), wanted, reference)


def test_pytorchs_fsdp_does_not_divide_by_tokens_which_is_why_that_loss_is_refused(reference: str) -> None:
    run_ranks(2, _check_per_token_loss, reference)


def _check_per_token_loss(rank: int, ranks: int, reference: str) -> None:
    """In Megatron-Core 0.16 the sum over tokens is not even sent; 0.19 sends it to a wrapper that ignores it."""
    harness.start(Topology(cp=2))
    config = (*LOCAL, ("calculate_per_token_loss", True))
    run = harness.train(Topology(cp=2), case("boundary", steps=1, config=config, wrapper="torch_fsdp2"))
    expected = torch.load(reference, weights_only=True)["gradients"]
    off = [(gradient.norm() / expected[name].norm()).item() for name, gradient in run.gradients.items()]
    assert min(off) > 10, "Megatron divides them now: the refusal in flags.py has no reason any more"
