"""Run a drawn step in Megatron's own schedule, over its ranks or on one, in float64."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from tests.fuzz.frameworks.expected_refusals import MEGATRON as REFUSALS
from tests.fuzz.frameworks.megatron_draw import VOCABULARY, MegatronDraw, draw
from tests.fuzz.frameworks.one_rank import ENDS, apart, hidden
from tests.fuzz.frameworks.steps import Found

__all__ = ["PRELOADED", "REFUSALS", "documented", "draw", "step"]

PRELOADED = (
    "megatron.core.parallel_state",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.transformer.multi_latent_attention",
    "dfa_megatron.megatron.spec",
    "tests.support.megatron_model",
    "tests.megatron.hybrids",
    "tests.megatron.padded_packs",
    "tests.fuzz.frameworks.megatron_step",
)
DELTA = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "activation_func": torch.nn.functional.silu,
}
"""The gated delta nets."""

_STANDING: list[tuple[int, ...]] = []
"""What the process groups were made for."""


def documented(drawn: MegatronDraw) -> str:
    """Return what the pages say of a draw that Megatron-Core computes otherwise where packs have padding, or ""."""
    weighed = drawn.config.get("moe_aux_loss_coeff") or drawn.config.get("moe_z_loss_coeff")
    if weighed and drawn.pack == "padded" and "mtp_num_layers" in drawn.config:
        return "documented: padding counts in the losses of the experts of prediction layers"
    return ""


def step(drawn: MegatronDraw, rank: int, ranks: int) -> Found:
    """Return the loss and the gradients of this rank's parameters."""
    # Megatron compiles small functions, which takes seconds.
    with torch.compiler.set_stance("force_eager"), _layers(drawn):
        return _step(drawn, alone=ranks == 1)


@contextlib.contextmanager
def _layers(drawn: MegatronDraw) -> Iterator[None]:
    """Have models built with the layers of the draw."""
    from tests.support import megatron_model as model

    if not drawn.delta_nets:
        yield
        return
    from tests.megatron import hybrids
    from tests.support import state_kernels

    state_kernels.install()
    model.megatrons_spec = hybrids.with_delta_nets
    try:
        yield
    finally:
        model.megatrons_spec = hybrids.MEGATRONS_SPEC


def _step(drawn: MegatronDraw, *, alone: bool) -> Found:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    from tests.support.megatron_model import global_name, mean_loss, places_of

    _start(drawn, alone)
    config = _config(drawn, alone)
    stages = range(drawn.vp) if drawn.vp and not alone else [None]
    chunks = [_chunk(drawn, config, alone, stage) for stage in stages]
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=drawn.overlap, bucket_size=500)
    models = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    if drawn.overlap:
        config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
    with apart() if alone and drawn.has_documents else contextlib.nullcontext():
        for number in [0] if alone else range(drawn.warm, -1, -1):  # the last is the first on one rank
            reported = _run(drawn, alone, models, number)
    loss = mean_loss(reported)
    found = Found(None if loss is None else loss.nan_to_num(0).item(), {}, {})
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = global_name(chunk, local_name)
            if name in found.gradients:
                continue  # a last stage with the embeddings itself leaves its output layer's copy alone
            found.gradients[name] = parameter.main_grad.clone()
            found.places[name] = places_of(name, parameter, config)[1]
    return found


def _run(drawn: MegatronDraw, alone: bool, models: list[Any], number: int) -> Any:
    """Run a step in Megatron's schedule, and return what its loss function reported."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    for model in models:
        model.train()
        model.zero_grad_buffer()
    iterators = [_batches(drawn, alone, number) for _ in models]
    return get_forward_backward_func()(
        forward_step_func=functools.partial(_forward, drawn, alone),
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(drawn.masks) if alone else drawn.micro_batches,
        seq_length=_length(drawn, alone),
        micro_batch_size=1 if drawn.has_documents else drawn.batch,
        forward_only=False,
    )


def _start(drawn: MegatronDraw, alone: bool) -> None:
    from dfa_megatron.megatron.stand_in import use_cpu

    use_cpu()
    from megatron.core import parallel_state, tensor_parallel

    from dfa_megatron.megatron.tokens.cuts import DECLARED

    DECLARED.clear()  # a script cuts its batches in one way
    _forget_logs()
    wanted = () if alone else drawn.start
    if [wanted] != _STANDING:
        dist.barrier()  # Megatron closes the groups that it forgets
        parallel_state.destroy_model_parallel()
        more = {"context_parallel_size": drawn.cp, "expert_model_parallel_size": drawn.ep}
        sizes = (drawn.tp, drawn.pp, drawn.vp)
        parallel_state.initialize_model_parallel(*(() if alone else sizes), **({} if alone else more))
        _STANDING[:] = [wanted]
    torch.manual_seed(7)
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def _forget_logs() -> None:
    """Forget what Megatron has logged of models with other layers."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    multi_token_prediction.MTPLossLoggingHelper.tracker = {}
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    with contextlib.suppress(ImportError):  # since Megatron-Core 0.19
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


def _config(drawn: MegatronDraw, alone: bool) -> Any:
    from tests.support.megatron_model import Parallel, config_of

    options = _options(drawn, alone)
    sizes = (
        Parallel(1, 1, 1, None, None) if alone else Parallel(drawn.tp, drawn.pp, drawn.cp, drawn.vp, options, drawn.ep)
    )
    delta = DELTA if drawn.delta_nets else {}
    given = {name: x for name, x in (drawn.config | delta).items() if not (alone and name.startswith("recompute"))}
    fields = {**given, "cp_comm_type": "dfa", "attention_dropout": 0.0, "hidden_dropout": 0.0}
    return config_of(fields, sizes, params_dtype=torch.float64, pipeline_dtype=torch.float64)


def _options(drawn: MegatronDraw, alone: bool) -> MegatronConfig | None:
    return None if alone else MegatronConfig(**drawn.options)


def _chunk(drawn: MegatronDraw, config: Any, alone: bool, stage: int | None) -> Any:
    from tests.support.megatron_model import build_chunk

    options = _options(drawn, alone)
    more = {"mtp_block_spec": _predictions(config, options, stage)} if config.mtp_num_layers else {}
    made = build_chunk(
        config, options, stage, vocab_size=VOCABULARY, max_sequence_length=64 + drawn.tokens, **drawn.model, **more
    )
    return made.double()


def _predictions(config: Any, options: MegatronConfig | None, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dfa_megatron.megatron import distribute_attention
    from tests.support.megatron_model import megatrons_spec

    spec = megatrons_spec(config, stage, dense=options is None)
    layer = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
    if options is not None:
        layer = distribute_attention(layer, config, config=options)
        assert not hasattr(layer, "layer_specs")
    block = TransformerBlockSubmodules(layer_specs=[layer])
    return get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=stage)


def _length(drawn: MegatronDraw, alone: bool) -> int:
    if drawn.pack == "padded" and not alone:
        return drawn.padded
    return drawn.tokens * drawn.batch if drawn.has_documents else drawn.tokens


def _batches(drawn: MegatronDraw, alone: bool, number: int) -> Iterator[dict[str, Any]]:
    """Yield this rank's micro-batches."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch
    from tests.megatron import padded_packs

    group = parallel_state.get_context_parallel_group()
    first, step = (0, 1) if alone else (parallel_state.get_data_parallel_rank(), drawn.dp)
    for whole in drawn.global_batch(number)[first::step]:
        given = dict(whole) if drawn.has_documents else {name: x for name, x in whole.items() if name != "cu_seqlens"}
        if alone:
            one = {name: x.reshape(1, -1) for name, x in given.items()} if drawn.has_documents else given
            yield one | ({"ends": _ends(whole)} if drawn.has_documents else {})
        elif drawn.pack == "padded":
            yield padded_packs.cut(given, drawn.cp, group.rank(), drawn.padded, form=drawn.number % 2)
        else:
            yield shard_batch(given, group, MegatronConfig(**drawn.options))


def _ends(whole: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """Return where the documents of all rows end, one row after another."""
    rows, length = whole["tokens"].shape
    return tuple(sorted({length * row + int(end) for row in range(rows) for end in whole["cu_seqlens"][row][1:]}))


def _forward(drawn: MegatronDraw, alone: bool, iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    from tests.megatron import attends, harness
    from tests.support import state_kernels

    batch = next(iterator)
    more: dict[str, Any] = {"loss_mask": batch["loss_mask"]}
    mask = None
    if alone:
        tokens = batch["tokens"].shape[1]
        ENDS[:] = batch.get("ends", (tokens,))
        mask = hidden(tokens)[None, None]
    if drawn.padding_mask:
        more["padding_mask"] = batch["loss_mask"] == 0
    cut = state_kernels.cut((0, *ENDS)) if alone and drawn.delta_nets else contextlib.nullcontext()
    if alone and drawn.pack in ("tree", "mask"):
        return attends.under_mask(batch, model, **more), functools.partial(_loss, drawn, alone, batch)
    with cut:
        output = model(**harness.taken(batch, attention_mask=mask, **more))
    return output, functools.partial(_loss, drawn, alone, batch)


def _loss(drawn: MegatronDraw, alone: bool, batch: dict[str, Any], output: torch.Tensor) -> Any:
    """Return what a script's loss function does, where a mean over tokens is that of all ranks."""
    from megatron.core import parallel_state

    total, tokens = (output.double() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
    report = {"lm loss": torch.stack([total.detach(), tokens])}
    if drawn.config["calculate_per_token_loss"]:
        return total, tokens.int(), report
    every = tokens.clone()
    dist.all_reduce(every, group=parallel_state.get_context_parallel_group())
    return total * (1 if alone else drawn.cp) / every.clamp(min=1), torch.tensor(1), report
