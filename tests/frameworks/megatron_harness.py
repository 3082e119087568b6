"""Run a step in Megatron's own schedule, with real models whose weights no topology can change."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks.compare import Found
from tests.fuzz.frameworks.megatron_draw import VOCABULARY, MegatronDraw
from tests.fuzz.frameworks.one_rank import ENDS, apart, hidden
from tests.megatron import attends, hybrids, padded_packs, replays, sharded
from tests.support import megatron_model as small_model
from tests.support import state_kernels

DELTAS = {"delta": "GatedDeltaNet", "kimi": hybrids.KIMIS}
"""The mixers of GPTs, by the layers of a draw."""
_STANDING: list[tuple[int, ...]] = []
"""What the process groups were made for."""


def step(drawn: MegatronDraw) -> Found:
    """Return the mean loss, the losses of this rank's tokens and the gradients of its parameters."""
    # Megatron compiles small functions, which takes seconds.
    with torch.compiler.set_stance("force_eager"), with_layers(drawn):
        start(drawn)
        return train(drawn, wrapped(drawn))


@contextlib.contextmanager
def with_layers(drawn: MegatronDraw) -> Iterator[None]:
    """Have models built with the layers of the draw."""
    if not drawn.layers:
        yield
        return
    state_kernels.install()
    with contextlib.ExitStack() as stack:
        if kind := DELTAS.get(drawn.layers):
            spec = functools.partial(hybrids.with_delta_nets, kind=kind)
            stack.enter_context(patch.object(small_model, "megatrons_spec", spec))
        if drawn.tp > 1:  # mixers share their weights as no whole ones could be cut
            stack.enter_context(patch.object(small_model, "set_weights", hybrids.set_weights_of_a_rank))
            stack.enter_context(patch.object(small_model, "places_of", lambda *_: ((), {})))
        yield


def start(drawn: MegatronDraw) -> None:
    """Make the process groups of a draw, and forget what others declared and logged; on a GPU where there is one."""
    if not torch.cuda.is_available():
        from dfa_megatron.megatron.stand_in import use_cpu

        use_cpu()
    from megatron.core import parallel_state, tensor_parallel

    from dfa_megatron.megatron.tokens.cuts import DECLARED

    DECLARED.clear()  # a script cuts its batches in one way
    _forget_logs()
    if [drawn.start] != _STANDING:
        dist.barrier()  # Megatron closes the groups that it forgets
        parallel_state.destroy_model_parallel()
        more = {"context_parallel_size": drawn.cp, "expert_model_parallel_size": drawn.ep}
        parallel_state.initialize_model_parallel(drawn.tp, drawn.pp, drawn.vp, **more)
        _STANDING[:] = [drawn.start]
    torch.manual_seed(7)
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(7)


@functools.cache
def group_of(*ranks: int) -> Any:
    """Return the group of these ranks, made once for all models of a process; every rank calls it in the same order."""
    return dist.new_group(list(ranks))


def _forget_logs() -> None:
    """Forget what Megatron has logged of models with other layers."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    multi_token_prediction.MTPLossLoggingHelper.tracker = {}
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    with contextlib.suppress(ImportError):  # since Megatron-Core 0.19
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

        destroy_moe_metrics_tracker()


def device() -> torch.device:
    """Return this rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def options_of(drawn: MegatronDraw) -> MegatronConfig | None:
    """Return our options, None for Megatron's own attention."""
    return None if drawn.options is None else MegatronConfig(**drawn.options)


def config_of(drawn: MegatronDraw, **changes: Any) -> Any:
    """Return the TransformerConfig of a draw."""
    dtype = getattr(torch, drawn.dtype.split()[0])
    fields = (hybrids.STATES if drawn.layers else {}) | drawn.config
    more = {"params_dtype": dtype, "pipeline_dtype": dtype, "use_cpu_initialization": not torch.cuda.is_available()}
    more |= {name: x for name, x in drawn.config.items() if name in more}
    return small_model.config_of(fields, drawn, **{**more, **changes})


def model_of(drawn: MegatronDraw, config: Any = None, stage: int | None = None) -> Any:
    """Return a model of a draw, or its chunk of that stage of a virtual pipeline."""
    config, options = config_of(drawn) if config is None else config, options_of(drawn)
    given = {"vocab_size": VOCABULARY, "max_sequence_length": 64 + drawn.tokens, **drawn.model}
    if drawn.layers not in ("", *DELTAS):
        made = hybrids.model(drawn.layers, config, options, **given)
    else:
        more = {"mtp_block_spec": predictions(config, options, stage)} if config.mtp_num_layers else {}
        made = small_model.build_chunk(config, options, stage, **given, **more)
    return made.to(device(), config.params_dtype).train()


def predictions(config: Any, options: MegatronConfig | None, stage: int | None = None) -> Any:
    """Return the spec of multi-token prediction layers like the decoder's last."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dfa_megatron.megatron import distribute_attention

    spec = small_model.megatrons_spec(config, stage, dense=options is None)
    layer = spec.layer_specs[-1] if hasattr(spec, "layer_specs") else spec
    if options is not None:
        layer = distribute_attention(layer, config, config=options)
        assert not hasattr(layer, "layer_specs")
    block = TransformerBlockSubmodules(layer_specs=[layer])
    return get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, vp_stage=stage)


def wrapped(drawn: MegatronDraw) -> list[Any]:
    """Return the chunks of a draw's model in its wrapper."""
    config = config_of(drawn)
    chunks = [model_of(drawn, config, stage) for stage in (range(drawn.vp) if drawn.vp else [None])]
    spread = drawn.optimizer == "distributed"
    ddp = {"overlap_param_gather": drawn.overlap and spread, "use_distributed_optimizer": spread, "bucket_size": 500}
    return [sharded.wrap(drawn.wrapper, config, c, overlap_grad_reduce=drawn.overlap, **ddp) for c in chunks]


def train(drawn: MegatronDraw, models: list[Any], optimizer: Any = None, numbers: Iterable[int] = ()) -> Found:
    """Run the steps of a draw, or those of some numbers, and return what the last one came to."""
    from megatron.core.distributed import finalize_model_grads

    config = models[0].config
    config.finalize_model_grads_func = finalize_model_grads if sharded.finalizes(models[0]) else None
    if drawn.overlap:
        config.no_sync_func = [model.no_sync for model in models] if len(models) > 1 else models[0].no_sync
    optimizer = optimizer or sharded.optimizer_of(drawn.optimizer, models, overlap=drawn.overlap)
    # Nothing moves without an optimizer, so that one rank runs the last step alone.
    numbers = numbers or ([0] if drawn.options is None and optimizer is None else range(drawn.warm, -1, -1))
    with apart() if drawn.options is None and drawn.has_documents else contextlib.nullcontext():
        for number in numbers:
            COUNTERS.reset()
            with _no_more_logits_than_a_tile(drawn, models):
                found = _found(drawn, models, *_run(drawn, models, number))
            _check_counts(drawn, models)
            if optimizer is not None:
                sharded.move(optimizer, models, found)
    return found


@contextlib.contextmanager
def _no_more_logits_than_a_tile(drawn: MegatronDraw, models: list[Any]) -> Iterator[None]:
    """Assert that a loss by tiles makes no logits of all tokens, and a loss of each head and micro-batch by tiles."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from dfa_megatron.loss.deferred import DeferredLogits

    if (drawn.options or {}).get("loss_tile", "off") == "off":
        yield
        return
    megatrons, losses, made = ColumnParallelLinear.forward, DeferredLogits.losses, list[int]()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert "forward" not in vars(self), "the logits of all tokens"
        return megatrons(self, *args, **kwargs)

    def counted(self: Any, labels: torch.Tensor, **given: Any) -> torch.Tensor:
        made.append(labels.numel())
        return losses(self, labels, **given)

    with patch.object(ColumnParallelLinear, "forward", forward), patch.object(DeferredLogits, "losses", counted):
        yield
    heads = sum(_inside(model).post_process for model in models) * (1 + (drawn.config.get("mtp_num_layers") or 0))
    full = drawn.config.get("recompute_granularity") == "full" and "mtp_num_layers" in drawn.config
    assert len(made) == heads * drawn.micro_batches or full, f"{drawn.line}: {made}"
    if drawn.pack != "padded" and drawn.batch * drawn.tokens % drawn.cp == 0:
        assert set(made) <= {drawn.batch * drawn.tokens // drawn.cp}, f"{drawn.line}: {made}"


def _run(drawn: MegatronDraw, models: list[Any], number: int) -> tuple[Any, dict[int, float]]:
    """Run a step in Megatron's schedule; return what its loss function reported, and the losses of tokens."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    tokens = dict[int, float]()
    for model in models:
        model.train()
        model.zero_grad_buffer()
    iterators = [batches(drawn, number) for _ in models]
    reported = get_forward_backward_func()(
        forward_step_func=functools.partial(_forward, drawn, tokens),
        data_iterator=iterators if len(models) > 1 else iterators[0], model=models if len(models) > 1 else models[0],
        num_microbatches=drawn.micro_batches, seq_length=length_of(drawn),
        micro_batch_size=1 if drawn.has_documents else drawn.batch, forward_only=False,
    )  # fmt: skip
    return reported, tokens


def _found(drawn: MegatronDraw, models: list[Any], reported: Any, tokens: dict[int, float]) -> Found:
    loss = small_model.mean_loss(reported)
    found = Found(None if loss is None else loss.nan_to_num(0).item(), {}, {}, tokens)
    replays.tell(found)
    # Beside a distributed optimizer, which tells the norm, each rank has a part of the summed gradients.
    for chunk in map(_inside, models if drawn.optimizer != "distributed" else ()):
        for local_name, parameter in chunk.named_parameters():
            name = small_model.global_name(chunk, local_name)
            if name in found.gradients:
                continue  # a last stage with the embeddings itself leaves its output layer's copy alone
            whole = parameter.grad.full_tensor() if drawn.wrapper == "torch_fsdp2" else parameter.main_grad
            found.gradients[name] = whole.cpu().clone()
            found.places[name] = small_model.places_of(name, parameter, chunk.config)[1]
    return found


def length_of(drawn: MegatronDraw) -> int:
    """Return the tokens of a row, as Megatron's schedules want to know them."""
    if drawn.pack == "padded" and drawn.options is not None:
        return drawn.padded
    return drawn.tokens * drawn.batch if drawn.has_documents else drawn.tokens


def batches(drawn: MegatronDraw, number: int = 0) -> Iterator[dict[str, Any]]:
    """Yield this rank's micro-batches of a step."""
    from megatron.core import parallel_state

    first = parallel_state.get_data_parallel_rank() if drawn.dp > 1 else 0  # or every rank does the same
    for micro in range(first, len(drawn.masks), drawn.dp):
        yield batch_of(drawn, parallel_state.get_context_parallel_group(), number, micro)


def batch_of(drawn: MegatronDraw, group: Any, number: int = 0, micro: int = 0) -> dict[str, Any]:
    """Return this rank's part of a micro-batch; `at` numbers the tokens of the global batch, padding is -1."""
    from dfa_megatron.megatron import shard_batch

    whole = drawn.global_batch(number)[micro]
    count = whole["tokens"].numel()
    whole["at"] = torch.arange(micro * count, (micro + 1) * count).view(whole["tokens"].shape)
    given = whole if drawn.has_documents else {name: x for name, x in whole.items() if name != "cu_seqlens"}
    if drawn.options is None:
        if drawn.has_documents:
            flat = {name: x.reshape(*x.shape[:-2], 1, -1) for name, x in whole.items() if name != "cu_seqlens"}
            given = {**flat, "ends": ends_of(whole)}
    elif drawn.pack == "padded":
        given = padded_packs.cut(given, group.size(), group.rank(), drawn.padded, form=drawn.number % 2)
    else:
        given = shard_batch(given, group, MegatronConfig(**drawn.options))
    if drawn.padding_mask:
        given = {**given, "padding_mask": given["loss_mask"] == 0}
    return {name: x.to(device()) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def ends_of(whole: dict[str, torch.Tensor]) -> tuple[int, ...]:
    """Return where the documents of all rows end, one row after another."""
    rows, length = whole["tokens"].shape
    return tuple(sorted({length * row + int(end) for row in range(rows) for end in whole["cu_seqlens"][row][1:]}))


def taken(batch: dict[str, Any], model: Any = None, **more: Any) -> dict[str, Any]:
    """Return what a model takes of a batch: of `shard_batch`, of Megatron's own, or of `padded_packs.cut`."""
    named = {"input_ids": batch.get("tokens"), "packed_seq_params": batch.get("params"), "attention_mask": None}
    names = ["position_ids", "labels", "loss_mask", "padding_mask", *named]
    if model is not None and "loss_mask" not in inspect.signature(type(model).forward).parameters:
        names.remove("loss_mask")  # a hybrid of Megatron-Core 0.16
    return {**named, **{name: batch[name] for name in names if name in batch}, **more}


def alone(drawn: MegatronDraw, batch: dict[str, Any], model: Any) -> torch.Tensor:
    """Return the losses of Megatron's own attention, (batch, tokens), where each token sees what it should."""
    if drawn.pack == "tree" and "num_moe_experts" not in drawn.config and "experimental" not in drawn.config:
        return attends.by_paths(batch, model)
    more = {name: x for name, x in taken(batch, _inside(model)).items() if name in ("loss_mask", "padding_mask")}
    if drawn.pack in ("tree", "mask"):
        return attends.under_mask(batch, model, **more)
    tokens = batch["tokens"].shape[1]
    ENDS[:] = batch.get("ends", (tokens,))
    with state_kernels.cut((0, *ENDS)) if drawn.layers else contextlib.nullcontext():
        out: torch.Tensor = model(**taken(batch, _inside(model), attention_mask=hidden(tokens)[None, None]))
    return out


def _inside(model: Any) -> Any:
    """Return the model in Megatron's wrappers."""
    while not hasattr(model, "share_embeddings_and_output_weights"):
        model = model.module
    return model


def _forward(
    drawn: MegatronDraw,
    tokens: dict[int, float],
    iterator: Iterator[dict[str, Any]],
    model: Any,
    return_schedule_plan: bool = False,
) -> Any:
    """Do what a script's forward_step_func does: the model's output, and a function that makes the loss of it."""
    batch, chunk = next(iterator), _inside(model)
    if return_schedule_plan:
        return chunk.build_schedule_plan(**_given(drawn, batch, chunk)), functools.partial(_loss, drawn, tokens, batch)
    with replays.replayed(drawn.routing, batch["at"], chunk):
        output = alone(drawn, batch, model) if drawn.options is None else model(**_given(drawn, batch, chunk))
    return output, functools.partial(_loss, drawn, tokens, batch)


def _given(drawn: MegatronDraw, batch: dict[str, Any], chunk: Any) -> dict[str, Any]:
    given = taken(batch, chunk)
    if drawn.number % 2 == 0:  # as Megatron's scripts: no stage gets what only others use
        needs = chunk.pre_process or (chunk.post_process and chunk.config.mtp_num_layers)
        given |= {} if needs else {"input_ids": None, "position_ids": None}
        given |= {} if chunk.post_process else {"labels": None}
    return given


def _loss(drawn: MegatronDraw, tokens: dict[int, float], batch: dict[str, Any], output: torch.Tensor, **_: Any) -> Any:
    """Do what a script's loss function does, in both forms of it, where a mean over tokens is that of all ranks.

    Megatron's own scripts divide by the tokens that a rank counts, which gives another loss on several ranks.
    """
    from megatron.core import parallel_state

    at = batch["at"].flatten().tolist()
    losses = output.detach().flatten().tolist()
    tokens.update({number: loss for number, loss in zip(at, losses, strict=True) if number >= 0})
    total, count = (output.double() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
    report = {"lm loss": torch.stack([total.detach(), count])}
    if drawn.config.get("calculate_per_token_loss"):
        return total, count.int(), report
    every = count.clone()
    dist.all_reduce(every, group=parallel_state.get_context_parallel_group())
    mean = total / every.clamp(min=1)
    return (mean * drawn.cp, torch.tensor(1), report) if drawn.number % 2 else (mean, report)


def _check_counts(drawn: MegatronDraw, models: list[Any]) -> None:
    """Assert that each attention ran once a layer and micro-batch, and again where Megatron's own recomputes it."""
    if drawn.options is None:
        return
    from dfa_megatron.megatron import DistributedCoreAttention

    asked, chunks = drawn.config, [_inside(model) for model in models]
    full, mode = asked.get("recompute_granularity") == "full", drawn.options.get("checkpoint", "auto")
    every = [sum(isinstance(part, DistributedCoreAttention) for part in chunk.modules()) for chunk in chunks]
    again = every
    if full and asked["recompute_method"] == "block" and mode != "remat":
        again = [min(asked["recompute_num_layers"], count) for count in every]
        if drawn.layers or asked.get("mtp_num_layers") or "heterogeneous_block_specs" in asked:
            return  # some of these layers have no such attention
    ours = mode == "remat" or (mode == "auto" and full)
    forwards, replays = sum(every) + (0 if ours else sum(again) * full), sum(again) * ours
    assert COUNTERS.attention_forwards == forwards * drawn.micro_batches, f"{drawn.line}: {COUNTERS}"
    states = COUNTERS.reused > replays * drawn.micro_batches and ours and drawn.layers  # mixers replay theirs
    assert states or COUNTERS.reused == replays * drawn.micro_batches, f"{drawn.line}: {COUNTERS}"
    assert (COUNTERS.remat_bytes > 0) == (COUNTERS.reused > 0), f"{drawn.line}: {COUNTERS}"
    odd = drawn.layers or drawn.pack == "padded" or drawn.batch * drawn.tokens % drawn.cp
    if not odd and "heterogeneous_block_specs" not in asked:
        heads, config = asked["num_attention_heads"] // drawn.tp, chunks[0].config
        rows = drawn.batch * drawn.tokens // drawn.cp * heads * COUNTERS.reused
        width = asked.get("v_head_dim") or config.kv_channels  # of out, and one lse
        kept = rows * (width + 1) * config.params_dtype.itemsize
        assert kept == COUNTERS.remat_bytes, f"{drawn.line}: {COUNTERS}, not {kept}"
    if drawn.options.get("ulysses_degree") == 2:
        exchanges = 2 * (forwards + sum(every)) * drawn.micro_batches  # a replay exchanges nothing
        assert exchanges == COUNTERS.ulysses_exchanges, f"{drawn.line}: {COUNTERS}"
    is_shared = drawn.cp > 1 and drawn.layout != "zigzag" and any(map(_has_states, chunks))
    single = drawn.has_documents and not drawn.name  # documents perhaps, which no rank shares
    assert single or (COUNTERS.state_exchanges > 0) == is_shared, f"{drawn.line}: {COUNTERS}"


def _has_states(chunk: Any) -> bool:
    kinds = {base.__name__ for part in chunk.modules() for base in type(part).__mro__}
    return not kinds.isdisjoint({"MambaMixer", *DELTAS.values()})
