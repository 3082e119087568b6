"""Mamba stacks and gated delta nets on contiguous tokens equal one rank, with packs and every parallelism."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.selfcheck import model as small_model
from dfa_megatron.megatron.tokens.exchange import positions
from dfa_megatron.megatron.tokens.others import refuse_other_layers
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.selfcheck.train import noise
from dfa_megatron.testing.workers import run_ranks
from tests.megatron import harness, test_hybrid
from tests.megatron.harness import MEGATRONS, Case, Topology, case
from tests.megatron.test_composition import ALLGATHER
from tests.support import state_kernels

LENGTH, BATCH = 12, 2
OFFSETS = (0, 1, 2, 9, 23, 24)
MAMBA = (("mamba_state_dim", 8), ("mamba_head_dim", 16), ("mamba_num_groups", 2), ("mamba_num_heads", 8))
DELTA = (
    ("linear_conv_kernel_dim", 4), ("linear_key_head_dim", 8), ("linear_value_head_dim", 16),
    ("linear_num_key_heads", 2), ("linear_num_value_heads", 4), ("activation_func", torch.nn.functional.silu),
)  # fmt: skip


def delta_spec() -> Any:
    """A TransformerLayer with a gated delta net, of Megatron's own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = {"in_proj": ColumnParallelLinear, "out_norm": WrappedTorchNorm, "out_proj": RowParallelLinear}
    layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=GatedDeltaNetSubmodules(**parts))
    return layer


def stack_spec() -> Any:
    """A stack with Megatron's Mamba mixer and, where this version has a slot for it, its gated delta net."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stack = test_hybrid.plain_spec()
    parts = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mixer = ModuleSpec(module=MambaMixer, submodules=parts)
    layer = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    stack.submodules.mamba_layer = ModuleSpec(module=MambaLayer, submodules=layer)
    if hasattr(stack.submodules, "gdn_layer"):
        delta = stack.submodules.gdn_layer = copy.deepcopy(stack.submodules.attention_layer)
        delta.submodules.self_attention = delta_spec().submodules.self_attention
    return stack


def build_stack(spec: Any, config: Any) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    layers = "M*-MG" if hasattr(spec.submodules, "gdn_layer") else "M*-M*"
    return test_hybrid.build(spec, config, ProcessGroupCollection.use_mpu_process_groups(), layers)


def build_gpt(spec: Any, config: Any) -> Any:
    """A block of gated delta nets and an attention: the decoder of a GPT."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return TransformerBlock(config, spec, post_layer_norm=False, pg_collection=groups).train()


def block_spec() -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [
        delta_spec(),
        delta_spec(),
        harness.megatrons_spec(harness.make_config(Topology(), MEGATRONS)),
        delta_spec(),
    ]
    return TransformerBlockSubmodules(layer_specs=layers)


MODELS = {
    "mamba": (stack_spec, build_stack, len(test_hybrid.PATTERN), (*MAMBA, *DELTA)),
    "delta": (block_spec, build_gpt, 4, DELTA),
}


def make(model: str, topology: Topology, options: DistAttentionConfig | None, tp_rank: int) -> Any:
    """The layers with weights that depend on names and the tensor-parallel rank alone."""
    from dfa_megatron.megatron import distribute_attention

    spec_of, build, layers, fields = MODELS[model]
    wanted = MEGATRONS if options is None else case(options.data_layout)
    # Megatron's PyTorch norms refuse sequence parallelism.
    spread = options is not None and topology.tp > 1
    config = harness.make_config(topology, wanted, num_layers=layers, sequence_parallel=spread, **dict(fields))
    spec = spec_of()
    made = build(spec if options is None else distribute_attention(spec, config, config=options), config)
    for name, parameter in made.named_parameters():
        mine = tp_rank if getattr(parameter, "tensor_model_parallel", False) else ""
        parameter.data.copy_(noise(f"{name} {mine}", tuple(parameter.shape)) * 0.3 + ("norm" in name))
    return made


def pack_and_mask(packed: bool, length: int) -> tuple[Any, torch.Tensor]:
    """PackedSeqParams, and the mask that keeps documents apart."""
    from megatron.core.packed_seq_params import PackedSeqParams

    mask = torch.ones(length, length).triu(1).bool()
    if not packed:
        return None, mask[None, None]
    offsets = torch.tensor(OFFSETS).int()
    document = torch.bucketize(torch.arange(length), offsets[1:], right=True)
    longest = int(offsets.diff().max())
    kind = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    params = PackedSeqParams(**kind, max_seqlen_q=longest, max_seqlen_kv=longest)
    return params, (mask | (document[:, None] != document))[None, None]


def run(model: str, topology: Topology, options: DistAttentionConfig | None, packed: bool) -> Any:
    """Output of this rank's tokens, gradients summed over the sequence's ranks, and the keys of a checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from dfa_megatron.megatron import declare_batch_layout

    tp_rank, group = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_group()
    made = make(model, topology, options, tp_rank)
    length, batch = (OFFSETS[-1], 1) if packed else (LENGTH, BATCH)
    generator = torch.Generator().manual_seed(3)
    whole, weights = (torch.randn(length, batch, harness.HIDDEN, generator=generator) for _ in range(2))
    order = "zigzag" if options is not None and options.data_layout == "boundary" else "contiguous"
    here = positions(order, length, topology.cp, dist.get_rank(group))
    if spread := made.config.sequence_parallel:
        here = here.chunk(topology.tp)[tp_rank]
    declare_batch_layout(group, order)
    table = RotaryEmbedding(harness.HIDDEN // harness.HEADS, 1.0, use_cpu_initialization=True, cp_group=group)
    params, mask = pack_and_mask(packed, length)
    hidden = whole[here].clone().requires_grad_()
    if options is None:
        with state_kernels.cut(OFFSETS) if packed else contextlib.nullcontext():
            out = made(hidden, mask, rotary_pos_emb=table(length))
    else:
        out = made(hidden, None, rotary_pos_emb=table(length, packed_seq=packed), packed_seq_params=params)
    (out * weights[here]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in made.named_parameters()}
    for name, p in made.named_parameters():
        dist.all_reduce(gradients[name], group=group)
        # As Megatron does after the backward, of norms that saw a part of the tokens or heads.
        if not getattr(p, "tensor_model_parallel", False) and (spread or "out_norm" in name):
            dist.all_reduce(gradients[name], group=parallel_state.get_tensor_model_parallel_group())
    return out.detach(), {**gradients, "hidden": hidden.grad}, set(made.sharded_state_dict()), here


def compare_with_one_rank(rank: int, ranks: int, topology: Topology, ways: list[tuple[str, str, str, bool]]) -> None:
    """Compare in each of the ways: model, layout, rematerialization, packed."""
    state_kernels.install()
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles small functions, which takes seconds
        harness.start(Topology(tp=topology.tp, dp=topology.cp))
        references = {
            (model, packed): run(model, Topology(tp=topology.tp, dp=topology.cp), None, packed)
            for model, _, _, packed in ways
        }
        harness.start(topology)
        for way in ways:
            _compare(topology, way, references[way[0], way[3]])


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Refuse layers that are not ours, as the launcher does for this layout."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    kept = TransformerLayer.__init__
    refuse_other_layers()
    try:
        yield
    finally:
        TransformerLayer.__init__ = kept


def _compare(topology: Topology, way: tuple[str, str, str, bool], reference: Any) -> None:
    model, layout, remat, packed = way
    wanted, wanted_gradients, keys, _ = reference
    COUNTERS.reset()
    options = DistAttentionConfig(data_layout=layout, remat=remat)
    with as_launched() if layout == "contiguous" else contextlib.nullcontext():
        out, gradients, our_keys, here = run(model, topology, options, packed)
    assert COUNTERS.state_exchanges > 0
    assert our_keys == keys
    where = f"{topology} {way}"
    torch.testing.assert_close(out, wanted[here], rtol=1e-4, atol=1e-4, msg=where)
    for name, gradient in wanted_gradients.items():
        gradient = gradient[here] if name == "hidden" else gradient
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= 5e-4, f"{where}: the gradient of {name} is off by {error:.2e}"


@pytest.mark.support("megatron", "Mamba stacks, packed and not; layout `contiguous`, CP 3, TP 2 x CP 2")
@pytest.mark.support(
    "megatron", "gated delta nets, packed and not; layouts `contiguous`, `boundary`, CP 3, TP 2 x CP 2"
)
def test_mamba_stacks_and_gated_delta_nets_in_order_equal_one_rank() -> None:
    three = [("mamba", "contiguous", "off", False), ("mamba", "contiguous", "on", True)]
    three += [("delta", "contiguous", "on", False), ("delta", "boundary", "on", True)]
    run_ranks(3, compare_with_one_rank, Topology(cp=3), three)
    four = [("mamba", "contiguous", "on", True), ("delta", "contiguous", "off", True)]
    run_ranks(4, compare_with_one_rank, Topology(tp=2, cp=2), four)


def with_delta_nets(config: Any, stage: int | None = None, *, dense: bool = False) -> Any:
    """Megatron's spec of the model's stage with a gated delta net in all layers but each stage's last."""
    from megatron.core.transformer.transformer_block import (
        LayerNormImpl,
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    megatrons = MEGATRONS_SPEC(config, stage, dense=dense)
    count = get_num_layers_to_build(config, stage)
    layers = getattr(megatrons, "layer_specs", [megatrons] * count)
    delta = delta_spec().submodules.self_attention
    given = [copy.deepcopy(layer) for layer in layers]
    for layer in given[::2]:
        layer.submodules.self_attention = delta
    norm = getattr(megatrons, "layer_norm", None) or LayerNormImpl
    return TransformerBlockSubmodules(layer_specs=given, layer_norm=norm)


MEGATRONS_SPEC = small_model.megatrons_spec


def in_a_gpt(rank: int, ranks: int, function: Any, *args: Any) -> Any:
    """Run a function of the harness on GPTs with gated delta nets."""
    state_kernels.install()
    small_model.megatrons_spec = with_delta_nets
    try:
        with torch.compiler.set_stance("force_eager"):
            return function(rank, ranks, *args)
    finally:
        small_model.megatrons_spec = MEGATRONS_SPEC


@pytest.mark.support("megatron", "GPTs with gated delta nets; PP 2 x CP 2, EP 2, distributed optimizer")
def test_a_gpt_with_gated_delta_nets_trains_like_one_rank(tmp_path: Path) -> None:
    path, given = str(tmp_path / "delta.pt"), {"config": (*DELTA, *ALLGATHER), "steps": 1}
    run_ranks(1, in_a_gpt, harness.save_reference, path, Case(None, optimizer="megatron", **given))
    spread = case("contiguous", "auto", optimizer="distributed", **given)
    run_ranks(4, in_a_gpt, harness.check_topologies, [(Topology(pp=2, cp=2, ep=2), spread, {}, path)])
