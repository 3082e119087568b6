"""Runs in the rank processes of a self-check: forward, backward, evaluation and three steps of the small model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.selfcheck.model import Parallel, build, config_of, global_name, places_of, start
from dfa_megatron.megatron.selfcheck.watch import tokens_of, watch
from dfa_megatron.megatron.start.cpu_stand_in import use_cpu
from dfa_megatron.selfcheck.record import Recorder

STEPS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """Hold the values that every part of a section needs."""

    settings: Mapping[str, Any]
    parallel: Parallel
    recorder: Recorder
    config: Any
    chunks: Sequence[Any]
    models: Sequence[Any]

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """Of this rank."""
        from megatron.core import parallel_state

        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group


def measure(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Run the sections on this rank; see `dfa_megatron.selfcheck.case.Case`."""
    use_cpu()
    sizes, options = settings["parallel"], DistAttentionConfig(**settings["options"])
    if whole:
        parallel = Parallel(1, 1, 1, None, None)
    else:
        parallel = Parallel(sizes["tp"], sizes["pp"], sizes["cp"], sizes["vp"], options)
    start(parallel)
    for section in sections:
        recorder.section = section
        if section == "three steps":
            _steps(_make(settings, parallel, recorder, as_asked=True))
        else:
            remat = "on" if section == "rematerialized" else "off"
            part = parallel if whole else Parallel(*sizes_of(parallel), options.replace(remat=remat))
            _passes(_make(settings, part, recorder, as_asked=False))


def sizes_of(parallel: Parallel) -> tuple[int, int, int, int | None]:
    """All but the options."""
    return parallel.tp, parallel.pp, parallel.cp, parallel.vp


def _make(settings: Mapping[str, Any], parallel: Parallel, recorder: Recorder, *, as_asked: bool) -> Run:
    """The model in Megatron's DDP; as_asked: with the user's recomputation and optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = config_of(settings, parallel, **(settings["recompute"] if as_asked and parallel.options else {}))
    chunks = build(settings, config, parallel)
    training = settings["training"]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=as_asked and training["use_distributed_optimizer"],
        overlap_grad_reduce=as_asked and training["overlap_grad_reduce"],
        overlap_param_gather=as_asked and training["use_distributed_optimizer"] and training["overlap_param_gather"],
        bucket_size=training["bucket_size"],
    )
    models = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [model.no_sync for model in models] if parallel.vp else models[0].no_sync
    return Run(settings, parallel, recorder, config, chunks, models)


def _passes(run: Run) -> None:
    """One forward and backward, every tensor of interest recorded; then evaluation."""
    training = run.settings["training"]
    micro_batches = run.parallel.pp if run.parallel.vp else 1
    recorder = run.recorder
    # Megatron divides by these later: its DDP by the ranks, its schedule by the micro-batches.
    divided = 1.0 if run.config.calculate_per_token_loss else micro_batches / run.parallel.cp
    groups = watch(run.chunks, recorder, run.parallel, divided)
    if groups:
        recorder.fact("context-parallel ranks of each attention", groups)
    loss = _forward_backward(run, [_micro_batch(training, 0, 0, run)] * micro_batches, "loss of each token")
    if loss is not None:
        recorder.add("loss", "mean of the batch", loss)
    for name, parameter, places in reversed(list(_parameters(run))):
        recorder.add("gradients of parameters", name, parameter.main_grad, (), places)
    for model in run.models:
        model.eval()
    with torch.no_grad():
        loss = _forward_backward(
            run, [_micro_batch(training, 0, 1, run)] * micro_batches, "evaluation: loss of each token", train=False
        )
    if loss is not None:
        recorder.add("evaluation: loss", "mean of the batch", loss)


def _steps(run: Run) -> None:
    """Three steps of the optimizer, as the user's flags ask for it."""
    training = run.settings["training"]
    optimizer = _optimizer(run)
    initial = {name: parameter.detach().clone() for name, parameter, _ in _parameters(run)}
    for step in range(1, STEPS + 1):
        batches = [_micro_batch(training, step, micro, run) for micro in range(training["micro_batches"])]
        loss = _forward_backward(run, batches, "")
        if loss is not None:
            run.recorder.add("loss", f"step {step}", loss)
        _, norm, _ = optimizer.step()
        if norm is not None:
            run.recorder.add("norm of the gradient", f"step {step}", torch.as_tensor(norm))
        for model in run.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)
        for name, parameter, places in _parameters(run):
            change = parameter.detach() - initial[name]
            run.recorder.add("change of parameters", f"step {step} {name}", change, (), places)


def _parameters(run: Run) -> Iterator[tuple[str, Any, dict[int, torch.Tensor]]]:
    for chunk in run.chunks:
        for name, parameter in chunk.named_parameters():
            whole_name = global_name(chunk, name)
            yield whole_name, parameter, places_of(whole_name, parameter, run.config)[1]


def _optimizer(run: Run) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    training = run.settings["training"]
    chosen = OptimizerConfig(
        optimizer=training["optimizer"],
        lr=training["lr"],
        min_lr=training["lr"],
        weight_decay=training["weight_decay"],
        adam_beta1=training["adam_beta1"],
        adam_beta2=training["adam_beta2"],
        adam_eps=training["adam_eps"],
        sgd_momentum=training["sgd_momentum"],
        clip_grad=training["clip_grad"],
        use_distributed_optimizer=training["use_distributed_optimizer"],
        overlap_param_gather=training["use_distributed_optimizer"] and training["overlap_param_gather"],
    )
    return get_megatron_optimizer(chosen, list(run.models))


def _micro_batch(training: Mapping[str, Any], step: int, micro: int, run: Run) -> dict[str, torch.Tensor]:
    """A whole micro-batch of random tokens, each entry (samples, tokens)."""
    tokens, samples = training["tokens"], training["micro_batch_size"]
    generator = torch.Generator().manual_seed(1000 * step + micro)
    rows = torch.randint(training["vocabulary"], (samples, tokens + 1), generator=generator)
    loss_mask = torch.ones(samples, tokens)
    if run.config.calculate_per_token_loss:  # otherwise Megatron's own loss depends on how many tokens each rank has
        loss_mask[:, : tokens // 3 : 2] = 0
    positions = torch.arange(tokens).expand(samples, -1).contiguous()
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": loss_mask, "position_ids": positions}
    return {name: x.contiguous() for name, x in batch.items()}


def _slice(run: Run, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """This rank's part, by the function that a script with these flags would use."""
    import megatron.core.utils

    from dfa_megatron.megatron.tokens.batch import shard_batch

    if run.parallel.options is not None and run.parallel.options.data_layout == "contiguous":
        return dict(shard_batch(batch, run.cp_group, run.parallel.options))
    slices: Any = megatron.core.utils.get_batch_on_this_cp_rank
    more = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(slices).parameters else {}
    return dict(slices(dict(batch), cp_group=run.cp_group, **more))


def _forward_backward(run: Run, batches: Sequence[Any], kind: str, *, train: bool = True) -> torch.Tensor | None:
    """Megatron's schedule over the micro-batches; the mean loss on the last stage of the pipeline."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    training = run.settings["training"]
    for model in run.models:
        model.zero_grad_buffer()
    iterators = [iter([_slice(run, batch) for batch in batches]) for _ in run.models]
    reported = get_forward_backward_func()(
        forward_step_func=_forward_step(run, kind),
        data_iterator=iterators if run.parallel.vp else iterators[0],
        model=list(run.models) if run.parallel.vp else run.models[0],
        num_microbatches=len(batches),
        seq_length=training["tokens"],
        micro_batch_size=training["micro_batch_size"],
        forward_only=not train,
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    total = torch.stack([entry["lm loss"] for entry in reported]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total[0] / total[1]


def _forward_step(run: Run, kind: str) -> Any:
    places = {1: tokens_of(run.parallel, run.settings["training"]["tokens"], inside=False)}

    def step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(iterator)
        output = model(batch["tokens"], batch["position_ids"], _mask(run), labels=batch["labels"])

        def loss(output: torch.Tensor, **_: Any) -> Any:
            if kind:
                run.recorder.add(kind, "every token", output, ("sample", "token"), places)
            total = (output.float() * batch["loss_mask"]).sum()
            tokens = batch["loss_mask"].sum()
            return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}

        return output, loss

    return step


def _mask(run: Run) -> torch.Tensor | None:
    """What Megatron's own attention takes where it has no window; True where a key is not seen."""
    tokens = run.settings["training"]["tokens"]
    return None if run.parallel.options is not None else torch.ones(1, 1, tokens, tokens).triu(1).bool()
