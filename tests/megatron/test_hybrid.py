"""Hybrid stacks: what becomes of their specs, and what would be in another order than other layers believe."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import BLOCK, like
from tests.megatron.hybrids import build, stack_spec
from tests.support.megatron_model import megatrons_spec
from tests.support.workers import run_ranks


def test_the_given_stack_spec_stays_and_every_layer_shares_one_context() -> None:
    from dfa_megatron.megatron import DistributedAttentionLayer, distribute_attention

    given = stack_spec()
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
    from megatron.core.transformer.spec_utils import ModuleSpec

    from dfa_megatron.megatron import distribute_attention

    harness.start(like("stack", {"cp": 2}))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    boundary, zigzag = (MegatronConfig(data_layout=layout) for layout in ("boundary", "zigzag"))
    spec = stack_spec()
    spec.submodules.mamba_layer = ModuleSpec(module=torch.nn.Identity)
    with pytest.raises(UnsupportedError, match=r"whose mamba_layer has the mixer None.*data_layout='zigzag'"):
        distribute_attention(spec, config=boundary)
    config = harness.config_of(like("stack", {"cp": 2}, "zigzag", config=BLOCK))
    with pytest.raises(UnsupportedError, match=r"'block' in a hybrid model.*uniform"):
        build(distribute_attention(spec, config, config=zigzag), config, groups)
    config = harness.config_of(like("plain", {"cp": 2}), is_hybrid_model=True)
    with pytest.raises(UnsupportedError, match=r"by itself in a hybrid model.*whole hybrid stack spec"):
        distribute_attention(megatrons_spec(config), config, config=boundary)(config=config, pg_collection=groups)


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
