"""In layout `boundary` routing, padding masks and hidden states between layers are in the caller's zigzag order."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness
from tests.megatron.harness import BATCH, LAYERS, MEGATRONS, SEQUENCE, Case, Topology, case
from tests.megatron.test_parity import EXPERTS

BALANCED = (("moe_router_load_balancing_type", "aux_loss"), ("moe_aux_loss_coeff", 0.5))
REPLAYED = (*EXPERTS, *BALANCED, ("moe_enable_routing_replay", True))
TOPK = 2


def mine(whole: torch.Tensor, topology: Topology) -> torch.Tensor:
    """This rank's rows of a tensor (sequence, ...), as Megatron has them: zigzag, then cut over tensor parallelism."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron.tokens.exchange import positions

    here = whole[positions("zigzag", SEQUENCE, topology.cp, parallel_state.get_context_parallel_rank())]
    return here.chunk(topology.tp)[parallel_state.get_tensor_model_parallel_rank()]


def build(topology: Topology, wanted: Case) -> tuple[Any, Any]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    harness.start(topology)
    RouterReplay.clear_global_router_replay_instances()
    return harness.make_model(harness.make_config(topology, wanted), wanted.options).train(), RouterReplay


def train_step(model: Any, wanted: Case, replay: Any, first: str, second: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of all tokens and its gradients over the context ranks; actions of the forward and the backward."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    from dfa_megatron.megatron import shard_batch

    group = parallel_state.get_context_parallel_group()
    padding = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(2)) < 0.4
    batch: Any = {**harness.micro_batch(0, 0), "padding_mask": padding}  # which the loss of balance leaves out
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool() if wanted.options is None else None
    if wanted.options is not None:
        batch = shard_batch(batch, group, wanted.options)
    replay.set_global_router_replay_action(RouterReplayAction[first])
    given = {name: batch[name] for name in ("labels", "padding_mask")}
    losses = model(batch["tokens"], batch["position_ids"], mask, **given).sum() / (BATCH * SEQUENCE)
    replay.set_global_router_replay_action(RouterReplayAction[second])
    losses.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        # An expert that no token of this rank went to has no gradient here.
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(gradients[name], group=group)
    total = losses.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item(), gradients


def random_routing() -> list[torch.Tensor]:
    """Experts of every token of the batch, (sequence, batch, topk), of both layers that have experts."""
    generator = torch.Generator().manual_seed(11)
    return [torch.rand(SEQUENCE, BATCH, 4, generator=generator).topk(TOPK).indices for _ in range(2)]


def check_replay(rank: int, ranks: int, topology: Topology) -> None:
    plain = Case(options=None, config=REPLAYED)
    ours = [
        case(layout, remat, config=REPLAYED)
        for layout, remat in (("zigzag", "off"), ("boundary", "off"), ("boundary", "auto"))
    ]
    model, replay = build(Topology(dp=ranks), plain)
    recorded_loss, _ = train_step(model, plain, replay, "RECORD", "RECORD")
    recorded = [kept.view(SEQUENCE, BATCH, TOPK) for kept in replay.get_recorded_data()]
    replay.set_replay_data([routing.flatten(0, 1) for routing in random_routing()])
    model.zero_grad()
    loss, expected = train_step(model, plain, replay, "REPLAY_FORWARD", "REPLAY_BACKWARD")
    assert abs(loss - recorded_loss) > 1e-3, "where tokens go tells"

    for wanted in ours:
        where = f"{topology} {wanted.options}"
        model, replay = build(topology, wanted)
        assert abs(train_step(model, wanted, replay, "RECORD", "RECORD")[0] - recorded_loss) <= 1e-5, where
        for kept, whole in zip(replay.get_recorded_data(), recorded, strict=True):
            assert torch.equal(kept.sort().values, mine(whole, topology).flatten(0, 1).sort().values), where
        replay.set_replay_data([mine(routing, topology).flatten(0, 1) for routing in random_routing()])
        model.zero_grad()
        replayed, gradients = train_step(model, wanted, replay, "REPLAY_FORWARD", "REPLAY_BACKWARD")
        assert abs(replayed - loss) <= 1e-5, where
        if topology.tp == 1:  # else each rank has a part of them
            for name, gradient in expected.items():
                error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
                assert error <= 1e-5, f"{where}: the gradient of {name} is off by {error:.2e}"

    replay.set_replay_data([mine(routing, topology).flatten(0, 1)[:-2] for routing in random_routing()])
    with pytest.raises(UnsupportedError, match=r"replayed routing of \d+ tokens.*this rank's router has"):
        train_step(model, wanted, replay, "REPLAY_FORWARD", "REPLAY_FORWARD")


@pytest.mark.support("megatron", "routing recorded and replayed, CP 2 and TP 2 x CP 2")
@pytest.mark.parametrize("topology", [Topology(cp=2), Topology(tp=2, cp=2)], ids=["cp2", "tp2-cp2-sequence-parallel"])
def test_routing_is_recorded_and_replayed_as_on_one_rank(topology: Topology) -> None:
    run_ranks(topology.ranks, check_replay, topology)


def hidden_states_between(
    model: Any, topology: Topology, masked: bool, layers: set[int]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of some layers, and the gradients of all parameters through them, summed over the sequence's ranks."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(5)
    whole, *weights = (torch.randn(SEQUENCE, BATCH, harness.HIDDEN, generator=generator) for _ in range(LAYERS + 1))
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool() if masked else None
    rows = mine(whole, topology).requires_grad_()
    rotary = model.rotary_pos_emb(SEQUENCE)
    _, between = model.decoder(
        hidden_states=rows, attention_mask=mask, rotary_pos_emb=rotary, extract_layer_indices=layers
    )
    total = sum((states * mine(weight, topology)).sum() for states, weight in zip(between, weights, strict=False))
    total.backward()  # type: ignore[union-attr]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return [states.detach() for states in between], gradients


def check_extracted(rank: int, ranks: int, topology: Topology) -> None:
    from megatron.core import parallel_state

    from dfa_megatron.megatron import declare_batch_layout

    layers = {0, 2, LAYERS - 1}
    harness.start(Topology(dp=ranks))
    reference = harness.make_model(harness.make_config(Topology(dp=ranks), MEGATRONS), None)
    expected, expected_gradients = hidden_states_between(reference, Topology(), True, layers)
    harness.start(topology)
    for layout, remat in (("zigzag", "off"), ("boundary", "off"), ("boundary", "auto")):
        wanted = case(layout, remat)
        model = harness.make_model(harness.make_config(topology, wanted), wanted.options).train()
        declare_batch_layout(parallel_state.get_context_parallel_group(), "zigzag")
        between, gradients = hidden_states_between(model, topology, False, layers)
        for number, (states, whole) in enumerate(zip(between, expected, strict=True)):
            error = (states - mine(whole, topology)).abs().max()
            assert error <= 1e-5 * whole.abs().max(), f"{layout}: the states of layer {number} are off by {error:.2e}"
        for name, gradient in expected_gradients.items() if topology.tp == 1 else ():
            error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
            assert error <= 1e-5, f"{layout}: the gradient of {name} is off by {error:.2e}"
    wanted = case("boundary", "off", recompute=("uniform", 2))
    model = harness.make_model(harness.make_config(topology, wanted), wanted.options).train()
    with pytest.raises(UnsupportedError, match=r"gave back 1 of 2 layers.*remat='auto'"):
        hidden_states_between(model, topology, False, {1, 2})


@pytest.mark.support("megatron", "hidden states of layers between, CP 2 and TP 2 x CP 2")
@pytest.mark.parametrize("topology", [Topology(cp=2), Topology(tp=2, cp=2)], ids=["cp2", "tp2-cp2-sequence-parallel"])
def test_hidden_states_of_layers_between_are_in_the_callers_order(topology: Topology) -> None:
    from megatron.core.transformer.transformer_block import TransformerBlock

    if "extract_layer_indices" not in inspect.signature(TransformerBlock.forward).parameters:
        pytest.skip("this megatron-core gives back no hidden states of layers between")
    run_ranks(topology.ranks, check_extracted, topology)
