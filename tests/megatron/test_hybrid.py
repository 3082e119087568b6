"""Hybrid stacks in layout `zigzag`: attention runs distributed, the layers between see tokens in Megatron's own order.

The other layouts: test_in_order.py.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.exchange import positions
from dfa_megatron.runtime.counters import COUNTERS
from tests.megatron import harness
from tests.megatron.harness import Topology, case, make_config
from tests.megatron.hybrids import PATTERN, build, stack_spec
from tests.support.workers import run_ranks

LENGTH, BATCH = 24, 2


class InMegatronsOrder(torch.nn.Module):
    """Stands in for a Mamba layer: what it does to a token depends on the token's place in the zigzag order."""

    calls = 0

    def __init__(self, config: Any, layer_number: int = 1, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.config, self.layer_number, self.cp_group = config, layer_number, pg_collection.cp
        self.mix = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        InMegatronsOrder.calls += 1
        ranks = dist.get_world_size(self.cp_group)
        here = positions("zigzag", len(hidden_states) * ranks, ranks, dist.get_rank(self.cp_group))
        return hidden_states + torch.tanh(self.mix(hidden_states)) * torch.sin(here.float())[:, None, None]


def plain_spec() -> Any:
    """A stack with such layers in the place of Mamba layers."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = stack_spec()
    spec.submodules.mamba_layer = ModuleSpec(module=InMegatronsOrder)
    return spec


def run(stack: Any, groups: Any, mask: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output in this rank's zigzag order, and gradients summed over the sequence's ranks."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    generator = torch.Generator().manual_seed(3)
    whole, weights = (torch.randn(LENGTH, BATCH, harness.HIDDEN, generator=generator) for _ in range(2))
    ranks = dist.get_world_size(groups.cp)
    here = positions("zigzag", LENGTH, ranks, dist.get_rank(groups.cp))
    rotary = RotaryEmbedding(harness.HIDDEN // harness.HEADS, 1.0, use_cpu_initialization=True, cp_group=groups.cp)
    hidden = whole[here].requires_grad_()
    out = stack(hidden, mask, rotary_pos_emb=rotary(LENGTH))
    (out * weights[here]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in stack.named_parameters()}
    if ranks > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=groups.cp)
    return out.detach(), {**gradients, "hidden": hidden.grad}


def compare_with_one_rank(rank: int, world_size: int) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from dfa_megatron.megatron import distribute_attention
    from dfa_megatron.megatron.layers.recompute import hide_flags

    harness.start(Topology(cp=world_size))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alone = copy.copy(groups)
    alone.cp = [dist.new_group([member]) for member in range(world_size)][rank]
    here = positions("zigzag", LENGTH, world_size, rank)

    spec = plain_spec()
    layers = {"num_layers": len(PATTERN)}
    causal = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
    reference = build(spec, make_config(Topology(), harness.MEGATRONS, **layers), alone)
    harness.set_weights(reference)
    expected, expected_gradients = run(reference, alone, causal)

    config = make_config(Topology(cp=world_size), case("zigzag", "auto"), **layers)
    options = MegatronConfig(data_layout="zigzag")
    ours = build(distribute_attention(spec, config, config=options), config, groups)
    harness.set_weights(ours)
    hide_flags(ours)  # as the first call of a language model does
    assert set(ours.state_dict()) == set(reference.state_dict())
    COUNTERS.reset()
    InMegatronsOrder.calls = 0
    out, gradients = run(ours, groups, None)
    torch.testing.assert_close(out, expected[here], rtol=1e-5, atol=1e-5)
    expected_gradients["hidden"] = expected_gradients["hidden"][here]
    for name, gradient in expected_gradients.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 1e-5, f"the gradient of {name} is off by {error:.2e}"
    attentions, others = PATTERN.count("*"), PATTERN.count("M")
    assert COUNTERS.attention_forwards == COUNTERS.replays == attentions
    assert InMegatronsOrder.calls == others * 2, "layers of other kinds are recomputed as asked for"


@pytest.mark.support("megatron", "hybrid (Mamba) stacks; layout `zigzag`, CP 3")
def test_a_hybrid_stack_equals_megatrons_own_on_one_rank() -> None:
    run_ranks(3, compare_with_one_rank)


def test_the_given_stack_spec_stays_and_every_layer_shares_one_context() -> None:
    from dfa_megatron.megatron import DistributedAttentionLayer, distribute_attention

    given = plain_spec()
    modules = {slot: layer.module for slot, layer in vars(given.submodules).items() if hasattr(layer, "module")}
    options = MegatronConfig(data_layout="zigzag")
    made = distribute_attention(given, config=options)
    assert {slot: getattr(given.submodules, slot).module for slot in modules} == modules
    assert issubclass(made.submodules.attention_layer.module, DistributedAttentionLayer)
    for slot, module in modules.items():
        assert issubclass(getattr(made.submodules, slot).module, module)
    contexts = {id(getattr(made.submodules, slot).params["distributed_attention"]) for slot in modules}
    assert len(contexts) == 1
    again = distribute_attention(made, config=options)
    assert again.submodules.mlp_layer.module is made.submodules.mlp_layer.module


def refuse(rank: int, world_size: int) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    from dfa_megatron.megatron import distribute_attention

    harness.start(Topology(cp=2))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    boundary, zigzag = (MegatronConfig(data_layout=layout) for layout in ("boundary", "zigzag"))
    with pytest.raises(UnsupportedError, match=r"whose mamba_layer has the mixer None.*data_layout='zigzag'"):
        distribute_attention(plain_spec(), config=boundary)
    config = make_config(Topology(cp=2), case("zigzag", recompute=("block", 1)), num_layers=len(PATTERN))
    with pytest.raises(UnsupportedError, match=r"'block' in a hybrid model.*uniform"):
        build(distribute_attention(plain_spec(), config, config=zigzag), config, groups)
    config = make_config(Topology(cp=2), case("boundary"), is_hybrid_model=True)
    with pytest.raises(UnsupportedError, match=r"by itself in a hybrid model.*whole hybrid stack spec"):
        distribute_attention(harness.megatrons_spec(config), config, config=boundary)(
            config=config, pg_collection=groups
        )


def test_what_would_be_in_another_order_than_other_layers_believe_is_refused() -> None:
    run_ranks(2, refuse)


def test_megatrons_spec_flag_finds_the_stack_spec_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.spec_utils import import_module

    import dfa_megatron.megatron as package
    from dfa_megatron.megatron.script import script_specs
    from dfa_megatron.megatron.spec import is_stack

    with contextlib.suppress(UnsupportedError):
        assert is_stack(script_specs.default_stack_spec())
    for home in ("megatron.core.models.hybrid.hybrid_layer_specs", "megatron.core.models.mamba.mamba_layer_specs"):
        monkeypatch.setitem(sys.modules, home, None)
    with pytest.raises(UnsupportedError, match=r"it cannot be imported: .*stack spec of your own"):
        script_specs.default_stack_spec()
    monkeypatch.setattr(script_specs, "default_stack_spec", stack_spec)
    try:
        made = import_module(("dfa_megatron.megatron", "hybrid_stack_spec"))
        assert made.submodules.attention_layer.params["distributed_attention"].options.data_layout == "boundary"
    finally:
        vars(package).pop("hybrid_stack_spec", None)
