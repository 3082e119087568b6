"""HybridModel and MambaModel equal one rank, with prediction layers that are stacks from Megatron-Core 0.19 on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from tests.megatron import harness
from tests.megatron.harness import MEGATRONS, Topology, case
from tests.megatron.hybrids import DELTA, MAMBA, stack_spec
from tests.support import state_kernels
from tests.support.models import noise
from tests.support.workers import run_ranks

MODEL: Any
try:
    from megatron.core.models.hybrid import hybrid_model

    MODEL, AHEAD = hybrid_model.HybridModel, 1
except ModuleNotFoundError:
    from megatron.core.models.mamba import mamba_model

    MODEL, AHEAD = mamba_model.MambaModel, None

LENGTH, VOCABULARY = 36, 64


def model_of(topology: Topology, options: MegatronConfig | None, ahead: int | None = AHEAD) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as prediction
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from dfa_megatron.megatron import distribute_attention

    wanted = MEGATRONS if options is None else case(options.data_layout)
    more = {"mtp_num_layers": ahead, "sequence_parallel": False, "calculate_per_token_loss": True}
    config = harness.make_config(topology, wanted, num_layers=3, **more, **dict((*MAMBA, *DELTA)))
    norms = dict.fromkeys(("enorm", "hnorm", "layer_norm"), WrappedTorchNorm)
    parts = prediction.MultiTokenPredictionLayerSubmodules(**norms, eh_proj=ColumnParallelLinear)
    layer = ModuleSpec(prediction.MultiTokenPredictionLayer, submodules=parts)
    block = prediction.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    spec = stack_spec()
    if ahead:
        spec.submodules.mtp_block_spec = ModuleSpec(prediction.MultiTokenPredictionBlock, submodules=block)
    if options is not None:
        spec = distribute_attention(spec, config, config=options)
    pattern = {"hybrid_layer_pattern": "M*M/M*" if ahead else "M*M"} if AHEAD else {"hybrid_override_pattern": "M*M"}
    model = MODEL(config, spec, VOCABULARY, LENGTH, **pattern, position_embedding_type="rope")
    for name, parameter in model.named_parameters():
        parameter.data.copy_(noise(name, tuple(parameter.shape)) * 0.2 + ("norm" in name))
    return model.train()


def run(topology: Topology, options: MegatronConfig | None) -> tuple[Any, Any, Any]:
    """Places of this rank's tokens, their losses, and gradients summed over the sequence's ranks."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    harness.start(topology)
    model, group = model_of(topology, options), parallel_state.get_context_parallel_group()
    rows = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    batch: Any = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": harness.loss_mask(0, LENGTH)}
    batch = {**batch, "position_ids": torch.arange(LENGTH).expand(2, -1)}
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool() if options is None else None
    batch = batch if options is None else shard_batch(batch, group, options)
    places = batch["position_ids"]
    given = harness.taken(batch, attention_mask=mask)
    if not AHEAD:
        del given["loss_mask"]
    out = model(**given)
    out.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    return places, out.detach(), gradients


def compare_with_one_rank(rank: int, ranks: int) -> None:
    state_kernels.install()
    with torch.compiler.set_stance("force_eager"):
        _, whole, wanted = run(Topology(dp=ranks), None)
        places, out, gradients = run(Topology(cp=ranks), MegatronConfig(data_layout="boundary", checkpoint="remat"))
    torch.testing.assert_close(out, whole.gather(1, places), rtol=1e-5, atol=1e-5)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).abs().max() <= 5e-5 * gradient.abs().max(), name


def test_a_hybrid_model_and_its_prediction_layers_train_on_zigzag_batches_like_one_rank() -> None:
    run_ranks(3, compare_with_one_rank)
