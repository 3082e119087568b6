"""Mamba stacks and gated delta nets equal one rank, with packs and every parallelism; what of them is refused."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.counters import COUNTERS
from tests.megatron import harness, padded_packs
from tests.megatron.attends import positions
from tests.megatron.harness import Case, Topology, case
from tests.megatron.hybrids import DELTA, in_a_gpt, make
from tests.megatron.kinds import ALLGATHER, LATENT, by_turns
from tests.support import state_kernels
from tests.support.recurrences import by_path
from tests.support.workers import run_ranks

LENGTH, BATCH = 12, 2
OFFSETS = (0, 1, 2, 9, 35, 36)
TREE = [1, 1, 7, 26, 1], [-1, 0, 1, 1, 3]
PADDED = {1: 42, 2: 52, 3: 72}
"""Tokens with padding, by ranks; real tokens lie on several of them."""


@dataclass(frozen=True)
class Way:
    """One forward and backward pass of a model."""

    model: str
    layout: str
    checkpoint: str
    tokens: str = "rows"
    """rows, packed (documents in a row that is cut), tree (its segments), or padded (each cut zigzag by itself)."""
    own: tuple[tuple[int, ...], ...] = ()
    """The ranks of each micro-batch, where it has a context-parallel group of its own."""
    efficient: bool = True
    """Whether Mamba's convolution and scan are one kernel of Megatron's."""


@dataclass
class Part:
    """The tokens of one rank."""

    group: Any
    here: torch.Tensor
    """Where they are in the whole sequence."""
    real: torch.Tensor
    """Which of them are not padding."""
    params: Any
    length: int
    """Of the rotary table."""


def mask_of(tokens: str, length: int) -> torch.Tensor:
    """The mask that keeps documents apart."""
    document = torch.bucketize(torch.arange(length), torch.tensor(OFFSETS[1:]), right=True)
    apart = (document[:, None] != document) & (tokens != "rows")
    return (torch.ones(length, length).triu(1).bool() | apart)[None, None]


def part_of(way: Way, options: MegatronConfig | None, group: Any) -> Part:
    """This rank's tokens, as the way cuts them."""
    from dfa_megatron.megatron import declare_batch_layout, shard_batch

    length = LENGTH if way.tokens == "rows" else OFFSETS[-1]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    offsets = torch.tensor(OFFSETS).int()
    own = {"local_cp_size": ranks, "hybrid_cp_group": group} if way.own else {}
    if way.tokens == "padded" and options is not None:
        every = {"tokens": torch.arange(length)[None], "cu_seqlens": offsets[None], "loss_mask": torch.ones(1, length)}
        every |= {"labels": every["tokens"], "position_ids": every["tokens"]}
        found = padded_packs.cut(every, ranks, rank, PADDED[ranks], form=way.checkpoint == "remat")
        params = found["params"]
        params.local_cp_size, params.cp_group = (ranks, group) if own else (None, None)
        return Part(group, found["tokens"][0] % length, found["loss_mask"][0].bool(), params, int(params.max_seqlen_q))
    order = "zigzag" if options is not None and way.layout != "contiguous" else "contiguous"
    here = positions(order, length, ranks, rank)
    declare_batch_layout(group, order)
    pack = {"prompt_tree": TREE} if way.tokens == "tree" else {"cu_seqlens": offsets}
    entries = {} if way.tokens == "rows" else {**pack, **own}
    params = shard_batch(entries, group, options or MegatronConfig())["packed_seq_params"]
    return Part(group, here, torch.ones(len(here), dtype=torch.bool), params, length)


def run(way: Way, topology: Topology, options: MegatronConfig | None, groups: Any = None) -> Any:
    """Output of this rank's tokens, gradients summed over the sequence's ranks, and the keys of a checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    tp_rank, models = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_group()
    more: dict[str, Any] = {"hybrid_context_parallel": True} if way.own and options else {}
    more |= {} if way.efficient else {"use_mamba_mem_eff_path": False}
    made = make(way.model, topology, options, tp_rank, **more)
    part = part_of(way, options, models if options is None or not way.own else groups[way.own])
    length, batch = (OFFSETS[-1], 1) if part.params is not None else (LENGTH, BATCH)
    generator = torch.Generator().manual_seed(3)
    whole, weights = (torch.randn(length, batch, harness.HIDDEN, generator=generator) for _ in range(2))
    if spread := made.config.sequence_parallel:
        part.here, part.real = (x.chunk(topology.tp)[tp_rank] for x in (part.here, part.real))
    table = RotaryEmbedding(harness.HIDDEN // harness.HEADS, 1.0, use_cpu_initialization=True, cp_group=models)
    hidden = whole[part.here].clone().requires_grad_()
    if options is None and way.tokens == "tree":
        out = by_path(
            lambda x: made(x["h"], mask_of("rows", n := len(x["h"])), rotary_pos_emb=table(n)),
            {"h": hidden},
            OFFSETS,
            TREE[1],
            0,
        )
    elif options is None:
        with state_kernels.cut(OFFSETS) if part.params is not None else contextlib.nullcontext():
            out = made(hidden, mask_of(way.tokens, length), rotary_pos_emb=table(length))
    else:
        rows = table(part.length, packed_seq=True)  # all of them
        out = made(hidden, None, rotary_pos_emb=rows, packed_seq_params=part.params)
    (out * weights[part.here] * part.real[:, None, None]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in made.named_parameters()}
    for name, p in made.named_parameters():
        dist.all_reduce(gradients[name], group=part.group)
        # As Megatron does after the backward, of norms that saw a part of the tokens or heads.
        if not getattr(p, "tensor_model_parallel", False) and (spread or "out_norm" in name):
            dist.all_reduce(gradients[name], group=parallel_state.get_tensor_model_parallel_group())
    return out.detach(), {**gradients, "hidden": hidden.grad}, set(made.sharded_state_dict()), part


def compare_with_one_rank(rank: int, ranks: int, topology: Topology, ways: list[Way]) -> None:
    """Compare each way with Megatron's own layers on one rank."""
    state_kernels.install()
    alone = Topology(tp=topology.tp, dp=ranks // topology.tp)
    groups = {}
    for own in dict.fromkeys(way.own for way in ways if way.own):
        groups[own] = [dist.new_group(members) for members in own][[rank in members for members in own].index(True)]
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles small functions, which takes seconds
        harness.start(alone)
        references = {}
        for way in ways:
            if (way.model, way.tokens) not in references:
                references[way.model, way.tokens] = run(way, alone, None)
        harness.start(topology)
        for way in ways:
            _compare(topology, way, references[way.model, way.tokens], groups)


def _compare(topology: Topology, way: Way, reference: Any, groups: Any) -> None:
    wanted, wanted_gradients, keys, _ = reference
    COUNTERS.reset()
    options = MegatronConfig(data_layout=way.layout, checkpoint=way.checkpoint)
    out, gradients, our_keys, part = run(way, topology, options, groups)
    assert (COUNTERS.state_exchanges > 0) == (part.group.size() > 1 and way.layout != "zigzag")
    assert (COUNTERS.replays >= COUNTERS.attention_forwards) == (way.checkpoint == "remat")
    assert our_keys == keys
    where, real = f"{topology} {way}", part.here[part.real]
    error = (out[part.real] - wanted[real]).abs().max() / wanted.abs().max()
    assert error <= 1e-5, f"{where}: the output is off by {error:.2e}"
    hidden = gradients.pop("hidden")
    assert not hidden[~part.real].any(), f"{where}: a real token reads padding"
    for name, gradient in {**gradients, "hidden": hidden[part.real]}.items():
        expected = wanted_gradients[name][real] if name == "hidden" else wanted_gradients[name]
        error = (gradient - expected).abs().max() / wanted_gradients[name].abs().max()
        assert error <= 5e-4, f"{where}: the gradient of {name} is off by {error:.2e}"


@pytest.mark.support("megatron", "hybrids (Mamba, gated delta nets), whole, packed and padded: CP 3, TP 2 x CP 2")
@pytest.mark.support("megatron", "hybrid (Mamba) stacks; layout `zigzag`, CP 3")
def test_mamba_stacks_and_gated_delta_nets_equal_one_rank() -> None:
    # The padded ways first: nobody has declared yet how batches are cut.
    three = [Way("mamba", "boundary", "remat", "padded"), Way("delta", "boundary", "none", "padded")]
    three += [Way("mamba", "boundary", "none"), Way("mamba", "contiguous", "remat", "packed")]
    three += [Way("delta", "contiguous", "remat"), Way("delta", "boundary", "remat", "tree")]
    three += [Way("mamba", "boundary", "remat", efficient=False)]
    three += [Way("mixers", "zigzag", "remat"), Way("mixers", "zigzag", "none")]  # in Megatron's own order
    run_ranks(3, compare_with_one_rank, Topology(cp=3), by_turns(three))
    four = [Way("mamba", "boundary", "none", "padded"), Way("delta", "contiguous", "none", "packed")]
    run_ranks(4, compare_with_one_rank, Topology(tp=2, cp=2), by_turns(four))


@pytest.mark.support("megatron", "hybrids with a context-parallel size per micro-batch: 1, 2, 3")
def test_states_pass_among_the_ranks_that_share_a_micro_batch_while_others_run_another() -> None:
    pair, every = ((0, 1), (2,)), ((0, 1, 2),)
    ways = [Way("mamba", "boundary", "remat", "padded", pair), Way("delta", "boundary", "none", "padded", every)]
    ways += [Way("mamba", "contiguous", "remat", "packed", pair), Way("delta", "contiguous", "remat", "packed", every)]
    run_ranks(3, compare_with_one_rank, Topology(dp=3), by_turns(ways))


@pytest.mark.support("megatron", "GPTs with gated delta nets; PP 2 x CP 2, EP 2, distributed optimizer")
def test_a_gpt_with_gated_delta_nets_trains_like_one_rank(tmp_path: Path) -> None:
    path, given = str(tmp_path / "delta.pt"), {"config": (*DELTA, *ALLGATHER), "steps": 1}
    run_ranks(1, in_a_gpt, harness.save_references, [(path, Case(None, optimizer="megatron", **given))])
    # A token that counts alone gives states of large gradients; Megatron's own over data ranks is as far off.
    spread = case("contiguous", "auto", optimizer="distributed", slack=2.0, **given)
    run_ranks(4, in_a_gpt, harness.check_topologies, [(Topology(pp=2, cp=2, ep=2), spread, {}, path)])


def named_tokens(rank: int, ranks: int) -> None:
    """Call the replaced kernels as every release of Megatron does, and with an option that only the kernel reads."""
    from dfa_megatron.megatron import in_order

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
        in_order._RUNNING.mixer = SimpleNamespace(dfa_where=lambda: group)  # type: ignore[assignment]
        try:
            out, state = rule(*args, **named, **states)
            with pytest.raises(UnsupportedError, match="option 'new_argument' of kernel"):
                rule(*args, **named, **states, new_argument=7)
            with pytest.raises(UnsupportedError, match="its states are not kept"):
                rule(*args, **named, **{**states, "initial_state": q})
        finally:
            in_order._RUNNING.mixer = None
        torch.testing.assert_close(out, wanted)
        assert state is None
        assert set(seen) == {7}


def test_the_replaced_delta_rule_takes_tokens_by_place_and_by_every_name_of_megatrons() -> None:
    run_ranks(2, named_tokens)


def renames() -> list[tuple[str, Any, str, str, Any]]:
    """Model, class, what its code calls, what a release may call instead, and what that is."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MultiLatentAttention

    def own(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(*query.shape[:2], query.shape[2] * value.shape[3])

    def zigzag(rotary: Any, *args: Any, **given: Any) -> Any:
        base: Any = type(rotary).__mro__[2]
        return base.forward(rotary, *args, **given)

    training = getattr(MambaMixer, "_ssm_training", None)
    core = r"(apply_module\()?self\.(core_attention\)?|_run_core_attention)\("
    by_fla = "gated_delta_net.gdn" in GatedDeltaNet.__module__
    convolution = state_kernels.causal_conv1d if by_fla else state_kernels.causal_conv1d_fn
    rule = state_kernels.chunk_gated_delta_rule
    return [
        ("mamba", MambaMixer, r"self\._ssm_training\(", "new_name(self, ", training),
        ("mamba", MambaMixer, r"self\.use_mem_eff_path\b", "new_name", False),
        ("delta", GatedDeltaNet, r"\bcausal_conv1d(_fn)?\(", "new_name(", convolution),
        ("delta", GatedDeltaNet, r"(self\.|\bchunk_)gated_delta_rule\(", "new_name(", rule),
        ("delta", Attention, core, "new_name(", own),
        ("gpt", Attention, core, "new_name(", own),
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


def call_of(model: str, options: MegatronConfig, draw: random.Random) -> None:
    """A forward and a backward, where a layer was dropped, frozen or recomputed."""
    if model in ("mamba", "delta"):
        run(Way(model, options.data_layout, options.checkpoint), Topology(cp=2), options)
        return
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    config = harness.make_config(Topology(cp=2), Case(options), **dict(LATENT if model == "latent" else ()))
    made = harness.make_model(config, options).train(draw.random() < 0.5)
    dropped, frozen = draw.sample(list(made.decoder.layers), 2)
    frozen.requires_grad_(False)
    dropped.forward = lambda hidden_states, *_, **__: (hidden_states, None)
    batch = shard_batch(harness.micro_batch(0, 0), parallel_state.get_context_parallel_group(), options)
    made(**batch).sum().backward()


def with_renames(rank: int, ranks: int, seed: int) -> None:
    """Rename each function that a mixer calls, and see that the mixer says so; then nothing is renamed any more."""
    state_kernels.install()
    draw = random.Random(seed)
    with torch.compiler.set_stance("force_eager"):
        for model, owner, old, new, value in renames():
            harness.start(Topology(cp=2))
            layout, checkpoint = draw.choice(("contiguous", "boundary")), draw.choice(("none", "remat"))
            options = MegatronConfig(data_layout=layout, checkpoint=checkpoint)
            message = r"a layer of type \w+ that did not reach .*this rank alone"
            with renamed(owner, old, new, value), pytest.raises(UnsupportedError, match=message):
                call_of(model, options, draw)
            call_of(model, options, draw)


def test_a_mixer_that_no_longer_reaches_our_functions_is_named_and_refused() -> None:
    run_ranks(2, with_renames, 20261128)


def test_a_name_that_is_replaced_and_is_not_there_is_refused() -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    from dfa_megatron.megatron import in_order, spec
    from dfa_megatron.megatron.layers import router
    from dfa_megatron.megatron.script import script_specs

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
    assert len(known) >= 10
    for owner, name in known:
        kept = vars(owner)[name]
        delattr(owner, name)
        try:
            with pytest.raises(UnsupportedError, match=rf"without \S+\.{name}: ours takes its place"):
                install()
        finally:
            setattr(owner, name, kept)
    install()
