"""Run three steps in the rank processes of a self-check: of DeepSpeed's engine, or of PyTorch on one rank."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed chooses its device when it is imported

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.deepspeed.json_block import KEY
from dfa_megatron.deepspeed.mesh import Mesh
from dfa_megatron.huggingface.check_model import check_model
from dfa_megatron.huggingface.selfcheck.model import batch_of, build
from dfa_megatron.huggingface.selfcheck.train import (
    gradient_of,
    mean_over_ranks,
    record_forward,
    record_gradients,
    tokens_of,
    whole_parameters,
)
from dfa_megatron.huggingface.selfcheck.watch import Watch
from dfa_megatron.selfcheck.record import Recorder
from dfa_megatron.selfcheck.train import LEAST_STEP, record_steps

EVALUATION = 100
"""Stands for a step in the seed of the evaluation batches."""


@dataclass(frozen=True, slots=True)
class Run:
    """Hold what every part of a section needs. The micro-batches of a step are numbered over data-parallel ranks."""

    settings: Mapping[str, Any]
    recorder: Recorder
    watch: Watch
    model: Any
    tokens: torch.Tensor

    @property
    def accumulated(self) -> int:
        """Micro-batches of a step."""
        return int(self.settings["engine"]["gradient_accumulation_steps"])

    def rows(self, step: int, number: int) -> dict[str, torch.Tensor]:
        """Return one micro-batch of one data-parallel rank, whole."""
        samples = self.settings["engine"]["train_micro_batch_size_per_gpu"]
        words, size = self.model.config.vocab_size, self.settings["size"]
        return batch_of(words, size, 1000 * step + number, samples)

    def record(
        self, output: Any, batch: Mapping[str, torch.Tensor], number: int, kind: str = "", mesh: Mesh | None = None
    ) -> None:
        """Record logits and losses of a micro-batch, which the ranks of a mesh share."""
        group = None if mesh is None else mesh.group
        record_forward(self.recorder, output, batch, self.tokens, kind, number, group)

    def record_steps(self, step: Callable[[int], Any], **whole: Any) -> None:
        """Run three steps as `selfcheck.train.record_steps`."""
        least = LEAST_STEP * self.settings["optimizer"]["params"]["lr"]
        record_steps(self.recorder, lambda: whole_parameters(self.model), step, least=least, **whole)


def measure(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Run the sections on this rank; see `dfa_megatron.selfcheck.case.Case`."""
    size, accumulated = settings["size"], settings["engine"]["gradient_accumulation_steps"]
    tokens = tokens_of(1 if whole else size, size, 0 if whole else dist.get_rank() % size)
    # Gradients become those of the first micro-batch's mean loss.
    watch = Watch(recorder, tokens, accumulated * (settings["data_size"] if whole else 1 / size))
    for section in sections:
        recorder.section = section
        model = build(settings["config"])
        check_model(model)
        watch.of_states(model)
        run = Run(settings, recorder, watch, model, tokens)
        if whole:
            watch.of_theirs(model)
            _one_rank(run)
        else:
            _engine(run, remat=section == "rematerialized")


def _one_rank(run: Run) -> None:
    """Compute the engine's steps with PyTorch's optimizer and the mean over all micro-batches."""
    model, chosen = run.model, run.settings["optimizer"]
    optimizer = getattr(torch.optim, chosen["type"])(model.parameters(), **chosen["params"])
    count = run.accumulated * run.settings["data_size"]

    def step(at: int) -> torch.Tensor | None:
        optimizer.zero_grad()
        losses = []
        for number in range(count):
            run.watch.on = at == 1 and number == 0
            batch = run.rows(at, number)
            output = model(**batch)
            if at == 1:
                run.record(output, batch, number)
            (output.loss / count).backward()
            losses.append(output.loss.detach())
        run.watch.on = False
        run.recorder.add("loss", f"step {at}", torch.stack(losses).mean())
        if at == 1:
            record_gradients(run.recorder, {name: gradient_of(x) for name, x in model.named_parameters()})
        clip = run.settings["engine"]["gradient_clipping"]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        return norm if run.settings["engine"]["zero_optimization"]["stage"] else None

    run.record_steps(step)
    model.eval()
    with torch.no_grad():
        for number in range(run.settings["data_size"]):
            batch = run.rows(EVALUATION, number)
            run.record(model(**batch), batch, number, "evaluation: ")


def _engine(run: Run, *, remat: bool) -> None:
    """Run the user's engine, made by the function that a script calls."""
    _prepare_process()
    settings = deepcopy(run.settings["engine"])
    if remat:
        settings[KEY] |= {"checkpoint": "remat", "reentrant": False}
    parameters = list(run.model.parameters())
    engine, *_ = dfa_ds.initialize(model=run.model, model_parameters=parameters, config=settings)
    run.watch.of_ours()
    mesh = dfa_ds.mesh_of(engine)
    # ZeRO-3 shards parameters outside this context.
    run.record_steps(
        lambda number: _step(run, engine, mesh, number), whole=lambda: deepspeed.zero.GatheredParameters(parameters)
    )
    engine.eval()
    with torch.no_grad():
        batch = dfa_ds.shard_batch(run.rows(EVALUATION, mesh.data_rank), group=mesh.group)
        run.record(engine(**batch), batch, mesh.data_rank, "evaluation: ", mesh)
    engine.destroy()


def _step(run: Run, engine: Any, mesh: Mesh, step: int) -> float | None:
    losses = []
    for micro in range(run.accumulated):
        number = micro * mesh.data_size + mesh.data_rank
        run.watch.on = step == 1 and number == 0
        batch = dfa_ds.shard_batch(run.rows(step, number), group=mesh.group)
        output = engine(**batch)
        if step == 1:
            run.record(output, batch, number, mesh=mesh)
        engine.backward(output.loss)
        losses.append(output.loss.detach())
        run.watch.on = False
        if micro < run.accumulated - 1:
            engine.step()
    run.recorder.add("loss", f"step {step}", mean_over_ranks(torch.stack(losses).mean()))
    if step == 1:
        record_gradients(run.recorder, dict(_gradients(engine)))
    engine.step()
    norm: float | None = engine.get_global_grad_norm() if engine.zero_optimization_stage() else None
    return norm


def _gradients(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the whole gradient of every parameter as the optimizer takes it; a collective call."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        yield name, torch.zeros(shape) if gradient is None else gradient.view(shape)


def _prepare_process() -> None:
    """Do the work of a launcher."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    # DeepSpeed would compile an operator for inference at its first use, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
