"""Specs: ours goes into any of Megatron's, Megatron finds it by name, and nothing of the given spec changes.

Every name of Megatron's that is replaced stands on its page, and can be put back.
"""

from __future__ import annotations

import copy
import importlib.util
import random
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import dfa_megatron.megatron as package
from dfa_megatron import hooks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron import DistributedAttentionLayer, DistributedCoreAttention, distribute_attention, in_order
from dfa_megatron.megatron import spec as package_spec
from dfa_megatron.megatron.layers.layer import takes_over
from dfa_megatron.megatron.replace import replace
from dfa_megatron.megatron.script import script_specs
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import BLOCK, FULL, like
from tests.support.arguments import assert_refused
from tests.support.megatron_model import megatrons_spec
from tests.support.pages import ROOT

OPTIONS = MegatronConfig(data_layout="boundary")


def config(sizes: dict[str, int] | None = None, **changes: Any) -> Any:
    return harness.config_of(like("plain", sizes), **changes)


def of_clone(comm_type: Any) -> Any:
    made = config()
    made.cp_comm_type = comm_type
    return made


@pytest.mark.parametrize("comm_type", [None, "p2p", "a2a", ["p2p", "dfa"], []])
def test_in_a_patched_clone_everything_stays_megatrons_without_the_flag(comm_type: Any) -> None:
    spec = megatrons_spec(of_clone(comm_type))
    assert script_specs.layer_spec(spec, of_clone(comm_type)) is spec
    assert script_specs.prediction_spec(spec, of_clone(comm_type)) is spec


@pytest.mark.parametrize("comm_type", ["dfa", ["dfa"], ["dfa", "dfa"]])
def test_in_a_patched_clone_the_flag_alone_distributes_the_default_spec(comm_type: Any) -> None:
    wanted = of_clone(comm_type)
    layer = script_specs.layer_spec(megatrons_spec(wanted), wanted)
    assert issubclass(layer.module, DistributedAttentionLayer)
    assert layer.params["distributed_attention"].options.data_layout == "boundary"
    predicting = script_specs.prediction_spec(megatrons_spec(wanted), wanted)  # get_gpt_mtp_block_spec takes its last
    assert issubclass(predicting.layer_specs[0].module, DistributedAttentionLayer)
    assert script_specs.layer_spec(layer, wanted).module is layer.module  # a user who also gives --spec


def test_a_layer_spec_gets_our_layer_and_attention_and_the_given_one_stays() -> None:
    given = local_spec(qk_layernorm=True)
    before = copy.deepcopy(given)
    spec = distribute_attention(given, config(), config=OPTIONS)
    assert (given.module, given.params) == (before.module, before.params)
    kept = given.submodules.self_attention.submodules.core_attention
    assert kept is local_spec(qk_layernorm=True).submodules.self_attention.submodules.core_attention
    assert issubclass(spec.module, DistributedAttentionLayer)
    assert issubclass(spec.module, given.module)
    attention = spec.submodules.self_attention.submodules
    assert attention.core_attention.module is DistributedCoreAttention
    assert attention.linear_qkv is given.submodules.self_attention.submodules.linear_qkv
    assert spec.submodules.mlp is given.submodules.mlp


def test_a_block_spec_with_experts_in_some_layers() -> None:
    block = TransformerBlockSubmodules(layer_specs=[local_spec(), local_spec(num_experts=2)], layer_norm=object())
    made = distribute_attention(block, config(), config=OPTIONS)
    assert made.layer_norm is block.layer_norm
    assert all(issubclass(layer.module, DistributedAttentionLayer) for layer in made.layer_specs)
    assert made.layer_specs[1].submodules.mlp is block.layer_specs[1].submodules.mlp
    assert not issubclass(block.layer_specs[0].module, DistributedAttentionLayer)
    layers = *made.layer_specs, *copy.deepcopy(made).layer_specs
    assert len({id(layer.params["distributed_attention"]) for layer in layers}) == 1, (
        "one for a model, also when Megatron copies its spec"
    )


def test_norms_without_transformer_engine_bear_sequence_parallelism_and_megatrons_own_attention_is_replaced_once() -> (
    None
):
    taken = local_spec()
    taken.submodules.self_attention.submodules.core_attention = ModuleSpec(module=DotProductAttention)
    once = distribute_attention(taken, config(), config=OPTIONS)
    assert distribute_attention(once, config(), config=OPTIONS).module is once.module
    assert WrappedTorchNorm(config({"tp": 2}), 8).weight.sequence_parallel
    assert not hasattr(WrappedTorchNorm(config(), 8).weight, "sequence_parallel")
    with pytest.raises(UnsupportedError, match="normalization"):
        WrappedTorchNorm(SimpleNamespace(normalization="L2Norm", sequence_parallel=True), 8)


def test_full_recomputation_is_taken_over_once_for_all_chunks_of_a_model() -> None:
    spec = distribute_attention(local_spec(), config(), config=OPTIONS)
    context = spec.params["distributed_attention"]
    taken = config(**BLOCK | {"recompute_num_layers": 2})
    assert [takes_over(taken, context, layer) for layer in (1, 2, 3)] == [True, True, False]
    assert (taken.recompute_granularity, taken.recompute_method, taken.recompute_num_layers) == ("full", "block", 2)
    assert takes_over(config(), context, 1) is None
    left = config(**FULL)
    off = distribute_attention(local_spec(), left, config=OPTIONS.replace(checkpoint="none"))
    assert takes_over(left, off.params["distributed_attention"], 1) is None
    assert left.recompute_granularity == "full"


def test_spec_for_older_scripts_is_made_of_their_global_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused("SPEC outside a Megatron script", import_module, ("dfa_megatron.megatron", "SPEC"))
    args = SimpleNamespace(
        num_experts=None, sequence_parallel=False, qk_layernorm=False, multi_latent_attention=False, qk_l2_norm=False,
        transformer_impl="local", normalization="RMSNorm",
    )  # fmt: skip
    monkeypatch.setattr(script_specs, "global_args", lambda: args)
    try:
        spec = import_module(("dfa_megatron.megatron", "SPEC"))
        assert issubclass(spec.module, DistributedAttentionLayer)
        assert spec.params["distributed_attention"].options.data_layout == "boundary"
    finally:
        vars(package).pop("SPEC", None)
    args.mla_down_proj_fusion = True
    assert_refused("SPEC with --mla-down-proj-fusion", script_specs.spec_from_args)
    args.num_experts = 8
    assert_refused("SPEC with --mla-down-proj-fusion, --num-experts:", script_specs.spec_from_args)


@pytest.mark.parametrize("minor", [17, 18])
def test_releases_between_the_tested_ones_are_refused(minor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_spec, "MINOR", minor)
    assert_refused(f"Megatron-Core 0.{minor}", distribute_attention, megatrons_spec(of_clone("dfa")))


def test_every_public_name_is_there() -> None:
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_the_import_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda *_: None)
        with pytest.raises(ImportError, match="needs Megatron-Core, which is not installed: pip install"):
            importlib.reload(package)
    monkeypatch.setitem(sys.modules, "dfa_megatron.megatron.proved_job", None)  # type: ignore[arg-type]
    assert_refused(r"this Megatron-Core.*an import fails", importlib.reload, package)


def test_every_module_that_holds_a_replaced_function_gets_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("nobody may ask for more than there is")

    home, draw = ModuleType("megatron.core.home"), random.Random(6)
    exec("def roll(x):\n    return x", vars(home))  # noqa: S102
    theirs, holders = vars(home)["roll"], [home]
    for at in range(8):
        module = draw.choice((ModuleType, Lazy))(draw.choice(("megatron.of", "trainer.of", "of")) + str(at))
        vars(module)[draw.choice(("roll", "roll_tensor", "_roll"))] = theirs
        vars(module)["kept"] = at
        holders.append(module)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "none", None)  # type: ignore[arg-type]
    for _ in range(2):
        replace(home, "roll", lambda megatrons: lambda x: megatrons(x) + 1)
    for module in holders:
        held = [x for x in vars(module).values() if callable(x)]
        assert theirs not in held
        assert [x(1) for x in held if getattr(x, "__name__", "") == "roll"] == [2]


def test_every_name_that_is_replaced_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in Path(package.__path__[0]).rglob("*.py"))
    names = {
        name for pair in re.findall(r'replace\(\w+, f?"(\w+)"|replaced = \{"(\w+)"', code) for name in pair if name
    }
    assert {"roll_tensor", "__init__", "z_loss_func", "train_step", "causal_conv1d"} <= names
    assert all(f"`{name}`" in page for name in names)
    table = page.partition("## Megatron-Core")[2].partition("## DeepSpeed")[0]
    assert table.count("\n| `") == 11


def test_names_that_were_replaced_are_put_back() -> None:
    hooks.restore()
    modules: dict[str, Any] = {name: module for name, module in sys.modules.items() if name.startswith("megatron.")}
    before, own = {name: dict(vars(module)) for name, module in modules.items()}, LanguageModule.__init__
    package_spec._replace_names(MegatronConfig(verify="on"))
    in_order._replace_calls()
    replaced = {name.rpartition(".")[2] for name in hooks.replaced()}
    assert {"roll_tensor", "__init__"} <= replaced
    assert LanguageModule.__init__ is not own
    hooks.restore()
    assert hooks.replaced() == []
    assert LanguageModule.__init__ is own
    for home, names in before.items():
        assert all(vars(modules[home]).get(name) is value for name, value in names.items()), home


@pytest.mark.parametrize("kind", ["module", "class", "subclass"])
def test_a_name_that_is_not_there_is_never_put_there(kind: str) -> None:
    base = type("Base", (), {"there": 1})
    owner, name = {"module": (ModuleType("theirs"), "gone"), "class": (base, "gone")}.get(
        kind, (type("Sub", (base,), {}), "there")
    )
    before, listed = dict(vars(owner)), hooks.replaced()
    assert_refused(rf"a version without \w+\.{name}", hooks.replace, owner, name, print)
    assert (dict(vars(owner)), hooks.replaced()) == (before, listed)
