"""Layers whose functions are replaced, in hybrids and for predictions: exact, by every name, and not reached."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import dfa_megatron.megatron as package
from dfa_megatron import hooks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron import DistributedAttentionLayer, distribute_attention, in_order, spec
from dfa_megatron.megatron.layers import router
from dfa_megatron.megatron.layers.prediction import rolling
from dfa_megatron.megatron.script import script_specs
from dfa_megatron.megatron.spec import is_stack
from dfa_megatron.megatron.tokens.visit import Exchange, Visit, running
from tests.frameworks import megatron_harness as harness
from tests.frameworks.compare import assert_alike
from tests.frameworks.megatron_rows import BLOCK, FULL, PER_TOKEN, like
from tests.fuzz.frameworks.megatron_draw import MegatronDraw
from tests.megatron.hybrids import build, stack_spec
from tests.megatron.test_all_parallelisms import STATES
from tests.support import state_kernels
from tests.support.arguments import assert_refused
from tests.support.megatron_model import DenseAttention, megatrons_spec
from tests.support.workers import by_turns, run_each, run_ranks


def beside_tensor_parallelism(rank: int, ranks: int, draws: list[MegatronDraw]) -> None:
    """Compare with Megatron's own layers on as many tensor-parallel ranks, whose weights are other ones than of one."""
    for draw in draws:
        want = harness.step(draw.alone(tp=2, dp=ranks // 2))
        for name, gradient in want.gradients.items():
            if "out_norm" in name:  # of its own heads, which sequence parallelism sums
                dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
            elif "q_layernorm" in name:  # Megatron sums it, although each rank has the whole without that
                gradient /= 2
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, want.tokens)
        found = harness.step(draw)
        found.places = {}  # both have the same parts
        assert_alike(found, {**want.whole(), "tokens": {at: x for part in every for at, x in part.items()}}, draw)


@pytest.mark.support("megatron", STATES)
@pytest.mark.support("megatron", "latent attention, PP 2 x CP 2 and TP 2 x CP 2")
def test_states_and_latent_attention_equal_tensor_parallelism_alone() -> None:
    """One rank is no reference: Megatron's own projection of a shared rotary key loses a gradient there."""
    sizes = {"tp": 2, "cp": 2}
    draws = [like("padded stack", sizes, "boundary"), like("packed delta", sizes)]
    draws += [like(f"{kind}latent", sizes, layout, "auto", config=FULL | PER_TOKEN) for kind, layout in LATENTS]
    run_ranks(4, beside_tensor_parallelism, by_turns(draws), timeout=120)


LATENTS = (("padded ", "boundary"), ("packed ", "contiguous"), ("", "zigzag"), ("", "boundary"))


def named_tokens(rank: int, ranks: int) -> None:
    """Call the replaced kernels as every release of Megatron does, and with an option that only the kernel reads."""
    seen: list[Any] = []

    def kernel(*args: Any, **given: Any) -> Any:
        seen.append(given.pop("chunk_size", None))
        return state_kernels.chunk_gated_delta_rule(*args, **given)

    rule = in_order._ruling(kernel)
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 4 * ranks, 2, 3, generator=draw, dtype=torch.float64) for _ in range(3))
    g, beta = (-torch.rand(1, 4 * ranks, 2, generator=draw, dtype=torch.float64) for _ in range(2))
    wanted = kernel(q, k, v, g, beta)[0].chunk(ranks, 1)[rank]
    q, k, v, g, beta = (x.chunk(ranks, 1)[rank] for x in (q, k, v, g, beta))
    states = {"initial_state": None, "output_final_state": False, "cu_seqlens": None, "chunk_size": 7}
    group = {"group": dist.group.WORLD, "cu_seqlens": None, "config": MegatronConfig()}
    calls = [((q, k, v), {"g": g, "beta": beta}), ((), {"q": q, "k": k, "v": v, "g": g, "beta": beta})]
    calls += [((), {"query": q, "key": k, "value": v, "g": g, "beta": beta}), ((q, k, v, g, beta), {})]
    for args, named in calls:
        if "query" not in named:  # a mixer that is not ours calls the kernel itself
            assert torch.equal(rule(*args, **named)[0], kernel(q, k, v, g, beta)[0])
        seen.clear()
        with hooks.for_a_while(in_order._MIXER, mixer=SimpleNamespace(dfa_where=lambda: group)):
            out, state = rule(*args, **named, **states)
            assert_refused("option 'new_argument' of kernel", rule, *args, **named, **states, new_argument=7)
            assert_refused("its states are not kept", rule, *args, **named, **{**states, "initial_state": q})
        torch.testing.assert_close(out, wanted)
        assert state is None
        assert set(seen) == {7}


def open_rolls(rank: int, ranks: int) -> None:
    """Call the replaced roll_tensor as every release does; a newer one asks for no sum, or for what nobody knows."""
    seen: list[Any] = []

    def megatrons(tensor: Any, shifts: int, dims: int, cp_group: Any, packed_seq_params: Any, **others: Any) -> Any:
        seen.append(others)
        return tensor, tensor.sum()

    group: Any = dist.group.WORLD
    roll, tokens = rolling(megatrons), torch.ones(1, 4)
    for others in ({}, {"return_sum": False}, {"return_sum": True, "new_argument": 7}):
        roll(tokens, -1, -1, group, None, **others)  # outside a distributed model
        assert seen[-1:] == [others]
    with running(Visit(None, group, "contiguous", "contiguous", None, (1, 4), Exchange(group))):
        assert roll(tokens, cp_group=group, return_sum=False)[1] is None
        assert roll(tokens, cp_group=group, return_sum=True)[1] is not None
        assert_refused("roll_tensor with new_argument", roll, tokens, cp_group=group, new_argument=7)


def scripts_predictions(rank: int, ranks: int) -> None:
    row = like("plain", {"cp": ranks})
    harness.start(row)
    for _ in range(2):  # the second time replaces nothing
        script_specs._distribute_predictions()
    config = harness.config_of(row, mtp_num_layers=1)
    block = gpt_layer_specs.get_gpt_mtp_block_spec(config, megatrons_spec(config), use_transformer_engine=False)
    parts = vars(block.layer_specs[0].submodules)
    inner = parts.get("transformer_layer") or parts["mtp_model_layer"]
    assert issubclass(inner.module, DistributedAttentionLayer)


def other_attention(rank: int, ranks: int) -> None:
    row = like("ahead", {"cp": ranks})
    harness.start(row)
    config = harness.config_of(row, mtp_num_layers=1)
    layer = megatrons_spec(config)
    layer.submodules.self_attention.submodules.core_attention = DenseAttention
    own = TransformerBlockSubmodules(layer_specs=[layer])
    block = get_gpt_mtp_block_spec(config, own, use_transformer_engine=False)
    with patch.object(harness, "predictions", lambda *_: block):
        model = harness.model_of(row, config)
    with pytest.raises(UnsupportedError, match=r"own attention in a distributed model, in layout 'contiguous'"):
        model(**harness.taken(next(harness.batches(row))))


def test_the_given_stack_spec_stays_and_every_layer_shares_one_context() -> None:
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


def other_order(rank: int, world_size: int) -> None:
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


def test_megatrons_spec_flag_finds_the_stack_spec_or_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(UnsupportedError):
        assert is_stack(script_specs.default_stack_spec())
    for home in ("megatron.core.models.hybrid.hybrid_layer_specs", "megatron.core.models.mamba.mamba_layer_specs"):
        monkeypatch.setitem(sys.modules, home, None)
    assert_refused(r"it cannot be imported: .*stack spec of your own", script_specs.default_stack_spec)
    monkeypatch.setattr(script_specs, "default_stack_spec", stack_spec)
    try:
        made = import_module(("dfa_megatron.megatron", "hybrid_stack_spec"))
        assert made.submodules.attention_layer.params["distributed_attention"].options.data_layout == "boundary"
    finally:
        vars(package).pop("hybrid_stack_spec", None)


def renames() -> list[tuple[str, Any, str, str, Any]]:
    """Model, class, what its code calls, what a release may call instead, and what that is."""

    def own(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        return query.new_zeros(*query.shape[:2], query.shape[2] * value.shape[3])

    def zigzag(rotary: Any, *args: Any, **given: Any) -> Any:
        base: Any = type(rotary).__mro__[2]
        return base.forward(rotary, *args, **given)

    training = getattr(MambaMixer, "_ssm_training", None)
    core = r"(apply_module\()?self\.(core_attention\)?|_run_core_attention)\("
    by_fla = "gated_delta_net.gdn" in GatedDeltaNet.__module__
    convolution = state_kernels.causal_conv1d if by_fla else state_kernels.causal_conv1d_fn
    rule = state_kernels.chunk_gated_delta_rule
    return [
        ("stack", MambaMixer, r"self\._ssm_training\(", "new_name(self, ", training),
        ("stack", MambaMixer, r"self\.use_mem_eff_path\b", "new_name", False),
        ("delta", GatedDeltaNet, r"\bcausal_conv1d(_fn)?\(", "new_name(", convolution),
        ("delta", GatedDeltaNet, r"(self\.|\bchunk_)gated_delta_rule\(", "new_name(", rule),
        ("delta", Attention, core, "new_name(", own),
        ("plain", Attention, core, "new_name(", own),
        ("latent", MultiLatentAttention, core, "new_name(", own),
        ("latent", MLASelfAttention, r"self\.rotary_pos_emb\(", "new_name(self.rotary_pos_emb, ", zigzag),
    ]


@contextlib.contextmanager
def renamed(owner: Any, old: str, new: str, value: Any) -> Iterator[None]:
    """Run every method of a class that calls the old name with the new one, as another release would."""
    home = sys.modules[owner.__module__]
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(home, "new_name", value, create=True))
        if owner.__name__ == "MambaMixer":  # einops is missing here, and the prefill needs all of it
            stack.enter_context(patch.object(owner, "_ssm_prefill", local_scan, create=True))
            stack.enter_context(patch.object(owner, "_static_prefill", local_scan, create=True))
        changed = 0
        for name, function in list(vars(owner).items()):
            text = textwrap.dedent(inspect.getsource(function)) if inspect.isfunction(function) else ""
            if name != "__init__" and re.search(old, text):
                made: dict[str, Any] = {}
                exec("from __future__ import annotations\n" + re.sub(old, new, text), vars(home), made)  # noqa: S102
                stack.enter_context(patch.object(owner, name, made[name]))
                changed += 1
        assert changed, f"{owner} calls no {old}"
        yield


def local_scan(mixer: Any, projected: torch.Tensor, **_: Any) -> torch.Tensor:
    return projected[..., : mixer.cp.d_inner_local_tpcp]


def call_of(model: str, sizes: dict[str, int], options: MegatronConfig, draw: random.Random) -> None:
    """A forward and a backward, where a layer was dropped, frozen or recomputed."""
    row = like(model, sizes, options.data_layout, options.checkpoint)
    with harness.with_layers(row):
        made = harness.model_of(row).train(draw.random() < 0.5 or model in ("stack", "delta"))
    if model in ("plain", "latent"):
        dropped, frozen = draw.sample(list(made.decoder.layers), 2)
        frozen.requires_grad_(False)
        dropped.forward = lambda hidden_states, *_, **__: (hidden_states, None)
    made(**harness.taken(next(harness.batches(row)), made)).sum().backward()


def with_renames(rank: int, ranks: int) -> None:
    """Rename each function that a mixer calls, and see that the mixer says so; then nothing is renamed any more."""
    state_kernels.install()
    draw = random.Random(20261128)
    with torch.compiler.set_stance("force_eager"):
        for model, owner, old, new, value in renames():
            harness.start(like("plain", {"cp": ranks}))
            layout, checkpoint = draw.choice(("contiguous", "boundary")), draw.choice(("none", "remat"))
            options = MegatronConfig(data_layout=layout, checkpoint=checkpoint)
            message = r"a layer of type \w+ that did not reach .*this rank alone"
            with renamed(owner, old, new, value), pytest.raises(UnsupportedError, match=message):
                call_of(model, {"cp": ranks}, options, draw)
            call_of(model, {"cp": ranks}, options, draw)


def test_calls_of_newer_releases_are_taken_and_what_does_not_reach_ours_or_is_in_another_order_is_refused() -> None:
    run_each(2, named_tokens, open_rolls, other_attention, scripts_predictions, other_order, with_renames, timeout=120)


def test_a_name_that_is_replaced_and_is_not_there_is_refused() -> None:
    known: list[tuple[Any, str]] = []

    def install() -> None:
        spec._replace_names(MegatronConfig())
        in_order._replace_calls()
        script_specs._distribute_predictions()
        experts = TopKRouter.__new__(TopKRouter)
        torch.nn.Module.__init__(experts)
        router.weigh_losses(SimpleNamespace(mlp=SimpleNamespace(router=experts)))

    with contextlib.ExitStack() as stack:
        for module in (spec, in_order, script_specs, router):
            note = lambda owner, name, replacing, optional=False: optional or known.append((owner, name))  # noqa: E731
            stack.enter_context(patch.object(module, "replace", note))
        install()
    assert len(known) >= 8
    for owner, name in known:
        kept = vars(owner)[name]
        delattr(owner, name)
        try:
            assert_refused(rf"without \S+\.{name}: ours takes its place", install)
        finally:
            setattr(owner, name, kept)
    install()
