"""Runs in the rank processes of a self-check: three steps of DeepSpeed's engine, or of PyTorch on one rank."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed chooses its device when it is imported

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from dfa_megatron.huggingface.selfcheck.model import batch_of, build, loss_of_each_token, shifted
from dfa_megatron.huggingface.selfcheck.train import STEPS, gradient_of, mean_over_ranks, record_gradients, tokens_of
from dfa_megatron.huggingface.selfcheck.watch import Watch
from dfa_megatron.selfcheck.record import Recorder

EVALUATION = 100
"""Stands for a step in the seed of the batches for evaluation."""


@dataclass(frozen=True, slots=True)
class Run:
    """What every part of a section needs. Micro-batches of a step are numbered, those of data-parallel ranks too."""

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
        """One micro-batch of one data-parallel rank, whole."""
        samples = self.settings["engine"]["train_micro_batch_size_per_gpu"]
        words, size = self.model.config.vocab_size, self.settings["size"]
        return batch_of(words, size, 1000 * step + number, samples)

    def record(
        self, output: Any, batch: Mapping[str, torch.Tensor], number: int, kind: str = "", mesh: Mesh | None = None
    ) -> None:
        """Logits, the loss of each token, and that of the micro-batch: of the engine, the mean over a mesh's ranks."""
        labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
        name, places = f"micro-batch {number}", {1: self.tokens}
        self.recorder.add(f"{kind}logits", name, output.logits, ("sample", "token", "word"), places)
        each = loss_of_each_token(output.logits, labels)
        self.recorder.add(f"{kind}loss of each token", name, each, ("sample", "token"), places)
        loss = output.loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(loss, group=mesh.group)
            loss /= mesh.size
        self.recorder.add(f"{kind}loss of each micro-batch", name, loss)

    def record_changes(self, step: int, initial: Mapping[str, torch.Tensor]) -> None:
        """How far parameters have come; they must be whole."""
        least = 0.1 * self.settings["optimizer"]["params"]["lr"]
        for name, parameter in self.model.named_parameters():
            change = parameter.detach() - initial[name]
            self.recorder.add("change of parameters", f"step {step} {name}", change, least=least)


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
        run = Run(settings, recorder, watch, model, tokens)
        if whole:
            watch.of_theirs(model)
            _one_rank(run)
        else:
            _engine(run, remat=section == "rematerialized")


def _one_rank(run: Run) -> None:
    """What the engine has to compute: PyTorch's optimizer, and the mean over all micro-batches."""
    model, chosen = run.model, run.settings["optimizer"]
    optimizer = getattr(torch.optim, chosen["type"])(model.parameters(), **chosen["params"])
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    count = run.accumulated * run.settings["data_size"]
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        losses = []
        for number in range(count):
            run.watch.on = step == 1 and number == 0
            batch = run.rows(step, number)
            output = model(**batch)
            if step == 1:
                run.record(output, batch, number)
            (output.loss / count).backward()
            losses.append(output.loss.detach())
        run.watch.on = False
        run.recorder.add("loss", f"step {step}", torch.stack(losses).mean())
        if step == 1:
            record_gradients(run.recorder, {name: gradient_of(x) for name, x in model.named_parameters()})
        clip = run.settings["engine"]["gradient_clipping"]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        if run.settings["engine"]["zero_optimization"]["stage"]:
            run.recorder.add("norm of the gradient", f"step {step}", norm)
        optimizer.step()
        run.record_changes(step, initial)
    model.eval()
    with torch.no_grad():
        for number in range(run.settings["data_size"]):
            batch = run.rows(EVALUATION, number)
            run.record(model(**batch), batch, number, "evaluation: ")


def _engine(run: Run, *, remat: bool) -> None:
    """The user's engine, made by the function that a script calls."""
    _prepare_process()
    settings = deepcopy(run.settings["engine"])
    if remat:
        settings[KEY] |= {"checkpoint": "remat", "reentrant": False}
    model = run.model
    engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    run.watch.of_ours()
    mesh = dfa_ds.mesh_of(engine)
    with _whole_parameters(model):
        initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for step in range(1, STEPS + 1):
        _step(run, engine, mesh, step)
        with _whole_parameters(model):
            run.record_changes(step, initial)
    engine.eval()
    with torch.no_grad():
        batch = dfa_ds.shard_batch(run.rows(EVALUATION, mesh.data_rank), group=mesh.group)
        run.record(engine(**batch), batch, mesh.data_rank, "evaluation: ", mesh)
    engine.destroy()


def _step(run: Run, engine: Any, mesh: Mesh, step: int) -> None:
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
    if engine.zero_optimization_stage():
        run.recorder.add("norm of the gradient", f"step {step}", torch.as_tensor(engine.get_global_grad_norm()))


def _gradients(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Of every parameter, whole, as the optimizer will have them; a collective call."""
    from deepspeed.utils import safe_get_full_grad

    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        yield name, torch.zeros(shape) if gradient is None else gradient.view(shape)


@contextmanager
def _whole_parameters(model: Any) -> Iterator[None]:
    """Within it parameters are whole, which ZeRO-3 otherwise shards."""
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        yield


def _prepare_process() -> None:
    """What a launcher would have done."""
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    # DeepSpeed would compile an operator for inference at its first use, which takes minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
