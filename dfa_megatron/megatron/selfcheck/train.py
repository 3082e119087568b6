"""Run the small model in the rank processes of a self-check: forward, backward, evaluation and three steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.megatron.selfcheck.delta_nets import use_stand_ins
from dfa_megatron.megatron.selfcheck.mamba_stacks import build_hybrid, use_mamba_stand_ins
from dfa_megatron.megatron.selfcheck.model import (
    Parallel,
    build_chunk,
    config_of,
    global_name,
    places_of,
    set_weights,
    start,
)
from dfa_megatron.megatron.selfcheck.watch import tokens_of, watch
from dfa_megatron.megatron.start.cpu_stand_in import use_cpu
from dfa_megatron.selfcheck.record import Recorder
from dfa_megatron.selfcheck.train import LEAST_STEP, record_steps


@dataclass(frozen=True, slots=True)
class Run:
    """Hold the values that every part of a section needs."""

    training: Mapping[str, Any]
    parallel: Parallel
    recorder: Recorder
    config: Any
    chunks: Sequence[Any]
    models: Sequence[Any]

    def parameters(self) -> Iterator[tuple[str, Any, dict[int, torch.Tensor]]]:
        """Yield every parameter as `selfcheck.train.Parameters`."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                whole_name = global_name(chunk, name)
                yield whole_name, parameter, places_of(whole_name, parameter, self.config)[1]


def measure(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Run the sections on this rank; see `dfa_megatron.selfcheck.case.Case`."""
    use_cpu()
    parallel = Parallel(1, 1, 1, None, None)
    if not whole:
        parallel = Parallel(**settings["parallel"], options=DistAttentionConfig(**settings["options"]))
    start(parallel)
    if settings["config"].get("linear_attention_freq") or settings["model"]["pattern"]:
        use_stand_ins()
        use_mamba_stand_ins()
    for section in sections:
        recorder.section = section
        if section == "three steps":
            _steps(_make(settings, parallel, recorder, as_asked=True))
            continue
        part = parallel
        if parallel.options is not None:
            remat = "on" if section == "rematerialized" else "off"
            part = replace(parallel, options=parallel.options.replace(remat=remat))
        _passes(_make(settings, part, recorder, as_asked=False))


def _make(settings: Mapping[str, Any], parallel: Parallel, recorder: Recorder, *, as_asked: bool) -> Run:
    """Wrap the model in Megatron's DDP; as_asked: with the user's recomputation and optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    more = settings["recompute"] if as_asked and parallel.options else {}
    config, training = config_of(settings["config"], parallel, **more), settings["training"]
    given = {
        "vocab_size": training["vocabulary"],
        "max_sequence_length": training["tokens"],
        "share_embeddings_and_output_weights": not settings["model"]["untie_embeddings_and_output_weights"],
        "seq_len_interpolation_factor": settings["model"]["rotary_seq_len_interpolation_factor"],
    }
    for name in ("position_embedding_type", "rotary_percent", "rotary_base"):
        given[name] = settings["model"][name]
    if pattern := settings["model"]["pattern"]:
        chunks = [build_hybrid(config, parallel.options, pattern, **given)]
        set_weights(chunks[0])
    else:
        scaled = {"rope_scaling": "use_rope_scaling", "rope_scaling_factor": "rope_scaling_factor"}
        given |= {name: settings["model"][asked] for name, asked in scaled.items()}
        stages = range(parallel.vp) if parallel.vp else [None]
        chunks = [build_chunk(config, parallel.options, stage, **given) for stage in stages]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=as_asked and training["use_distributed_optimizer"],
        overlap_grad_reduce=as_asked and training["overlap_grad_reduce"],
        overlap_param_gather=as_asked and training["overlap_param_gather"],
        bucket_size=training["bucket_size"],
    )
    models = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = [model.no_sync for model in models] if parallel.vp else models[0].no_sync
    return Run(training, parallel, recorder, config, chunks, models)


def _passes(run: Run) -> None:
    """Run one forward and backward and record every tensor of interest; then evaluate."""
    count = run.parallel.pp if run.parallel.vp else 1
    # Megatron divides by these later: its DDP by the ranks, its schedule by the micro-batches.
    divided = 1.0 if run.config.calculate_per_token_loss else count / run.parallel.cp
    if groups := watch(run.chunks, run.recorder, run.parallel, divided):
        run.recorder.fact("context-parallel ranks of each attention", groups)
    _pass(run, [_micro_batch(0, 0, run)] * count, "")
    for name, parameter, places in reversed(list(run.parameters())):
        run.recorder.add("gradients of parameters", name, parameter.main_grad, (), places)
    for model in run.models:
        model.eval()
    with torch.no_grad():
        _pass(run, [_micro_batch(0, 1, run)] * count, "evaluation: ")


def _pass(run: Run, batches: Sequence[Any], kind: str) -> None:
    loss = _forward_backward(run, batches, f"{kind}loss of each token", train=not kind)
    if loss is not None:
        run.recorder.add(f"{kind}loss", "mean of the batch", loss)


def _steps(run: Run) -> None:
    """Run three steps of the optimizer, as the user's flags ask for it."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    training = run.training
    names = (
        "optimizer", "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "clip_grad",
        "use_distributed_optimizer", "overlap_param_gather",
    )  # fmt: skip
    chosen = OptimizerConfig(min_lr=training["lr"], **{name: training[name] for name in names})
    optimizer = get_megatron_optimizer(chosen, list(run.models))

    def step(number: int) -> Any:
        batches = [_micro_batch(number, micro, run) for micro in range(training["micro_batches"])]
        loss = _forward_backward(run, batches, "")
        if loss is not None:
            run.recorder.add("loss", f"step {number}", loss)
        _, norm, _ = optimizer.step()
        for model in run.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)
        return norm

    least = LEAST_STEP * training["lr"] if training["optimizer"] == "adam" else 0.0
    record_steps(run.recorder, run.parameters, step, least=least)


def _micro_batch(step: int, micro: int, run: Run) -> dict[str, torch.Tensor]:
    """Return a whole micro-batch of random tokens, each entry (samples, tokens)."""
    tokens, samples = run.training["tokens"], run.training["micro_batch_size"]
    generator = torch.Generator().manual_seed(1000 * step + micro)
    rows = torch.randint(run.training["vocabulary"], (samples, tokens + 1), generator=generator)
    loss_mask = torch.ones(samples, tokens)
    if run.config.calculate_per_token_loss:  # otherwise Megatron's loss depends on how many tokens each rank counts
        loss_mask[:, : tokens // 3 : 2] = 0
    positions = torch.arange(tokens).expand(samples, -1).contiguous()
    batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:], "loss_mask": loss_mask, "position_ids": positions}
    return {name: x.contiguous() for name, x in batch.items()}


def _slice(run: Run, batch: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return this rank's tokens, cut by the function that a script with these flags would use."""
    import megatron.core.utils
    from megatron.core import parallel_state

    from dfa_megatron.megatron.tokens.batch import shard_batch

    group = parallel_state.get_context_parallel_group()
    if run.parallel.options is not None and run.parallel.options.data_layout == "contiguous":
        return dict(shard_batch(batch, group, run.parallel.options))
    slices: Any = megatron.core.utils.get_batch_on_this_cp_rank
    more = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(slices).parameters else {}
    return dict(slices(dict(batch), cp_group=group, **more))


def _forward_backward(run: Run, batches: Sequence[Any], kind: str, *, train: bool = True) -> torch.Tensor | None:
    """Run Megatron's schedule over the micro-batches; return the mean loss on the last stage of the pipeline."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    for model in run.models:
        model.zero_grad_buffer()
    iterators = [iter([_slice(run, batch) for batch in batches]) for _ in run.models]
    reported = get_forward_backward_func()(
        forward_step_func=_forward_step(run, kind),
        data_iterator=iterators if run.parallel.vp else iterators[0],
        model=list(run.models) if run.parallel.vp else run.models[0],
        num_microbatches=len(batches),
        seq_length=run.training["tokens"],
        micro_batch_size=run.training["micro_batch_size"],
        forward_only=not train,
    )
    return mean_loss(reported)


def mean_loss(reported: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor | None:
    """Return the mean loss of a global batch from what `loss_function` reported; None before the last stage."""
    from megatron.core import parallel_state

    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    total = torch.stack([entry["lm loss"] for entry in reported]).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total[0] / total[1]


def loss_function(batch: Mapping[str, torch.Tensor], seen: Callable[[torch.Tensor], Any] = lambda _: None) -> Any:
    """Return the loss function that Megatron's schedule wants; `seen` is called with the loss of each token."""

    def loss(output: torch.Tensor, **_: Any) -> Any:
        seen(output)
        total, tokens = (output.float() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        return total, tokens.int(), {"lm loss": torch.stack([total.detach(), tokens])}

    return loss


def _forward_step(run: Run, kind: str) -> Any:
    tokens, one = run.training["tokens"], run.parallel.options is None
    places = {1: tokens_of(run.parallel, tokens, inside=False)}
    # Megatron's own attention needs a mask where it has no window; True hides a key.
    mask = torch.ones(1, 1, tokens, tokens).triu(1).bool() if one else None

    def seen(output: torch.Tensor) -> None:
        if kind:
            run.recorder.add(kind, "every token", output, ("sample", "token"), places)

    def step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(iterator)
        output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        return output, loss_function(batch, seen)

    return step
