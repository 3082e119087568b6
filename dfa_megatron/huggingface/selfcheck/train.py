"""Runs in the rank processes of a self-check: forward, backward, evaluation and three steps of the small model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface.check_model import check_model
from dfa_megatron.huggingface.selfcheck.model import batch_of, build, loss_of_each_token, shifted
from dfa_megatron.huggingface.selfcheck.shrink import ROWS
from dfa_megatron.huggingface.selfcheck.watch import Watch
from dfa_megatron.selfcheck.record import Recorder

LEARNING_RATE, ADAM_EPS, CLIP, STEPS = 1e-2, 1e-3, 1.0, 3
"""Steps that are large beside the rounding of weights. Adam divides by its eps where a gradient is small: with this one
rounding errors stay what they are."""
_TOKENS = ("sample", "token")


@dataclass(frozen=True, slots=True)
class Run:
    """What every part of a section needs: `ranks` are there, `asked` are those of the case, and `whole` is one rank."""

    model: Any
    recorder: Recorder
    ranks: int
    asked: int
    words: int
    whole: bool

    @property
    def tokens(self) -> torch.Tensor:
        """The global indices of this rank's tokens, written down here once more."""
        return tokens_of(self.ranks, self.asked)

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """What a training script gives to its model."""
        whole = batch_of(self.words, self.asked, seed)
        return whole if self.whole else dfa_hf.shard_batch(whole)


def tokens_of(ranks: int, asked: int, rank: int | None = None) -> torch.Tensor:
    """Of a rank, this one if None."""
    rank = dist.get_rank() if rank is None else rank
    part: torch.Tensor = torch.arange(ROWS * asked).chunk(ranks)[rank]
    return part


def measure(settings: Mapping[str, Any], sections: Sequence[str], whole: bool, recorder: Recorder) -> None:
    """Run the sections on this rank; see `dfa_megatron.selfcheck.case.Case`."""
    ranks = dist.get_world_size()
    watch: Watch | None = None
    for section in sections:
        recorder.section = section
        model = build(settings["config"])
        check_model(model)
        run = Run(model, recorder, ranks, settings["ranks"], model.config.vocab_size, whole)
        if watch is None:
            watch = Watch(recorder, run.tokens, 1.0 if whole else 1 / ranks)
            if whole:
                watch.of_theirs(model)
        if not whole:
            options = DistAttentionConfig(**settings["options"])
            if section != "three steps":
                options = options.replace(checkpoint="remat" if section == "rematerialized" else "none")
            reentrant = settings["reentrant"] and section == "three steps"
            dfa_hf.distribute_attention(model, config=options, reentrant=reentrant)
            watch.of_ours()
        watch.on = section != "three steps"
        (_steps if section == "three steps" else _passes)(run)


def _wrapped(run: Run) -> Any:
    """In PyTorch's DDP, which averages gradients over all ranks; of one rank the model itself."""
    return run.model if run.whole else DistributedDataParallel(run.model, find_unused_parameters=True)


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Of a number, as a script would print it."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def _passes(run: Run) -> None:
    """One forward and backward, every tensor of interest recorded; then evaluation."""
    model, recorder = _wrapped(run), run.recorder
    loss = record_forward(recorder, model(**run.batch(0)), run.batch(0), run.tokens, "")
    loss.backward()
    record_gradients(recorder, {name: gradient_of(x) for name, x in run.model.named_parameters()})
    model.eval()
    with torch.no_grad():
        record_forward(recorder, model(**run.batch(1)), run.batch(1), run.tokens, "evaluation: ")


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Zeros where no token used the parameter, as that of an expert."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def record_gradients(recorder: Recorder, gradients: Mapping[str, torch.Tensor]) -> None:
    """Record the gradients of all parameters, the last layer's first."""
    least = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in reversed(list(gradients.items())):
        recorder.add("gradients of parameters", name, gradient, least=least)


def record_forward(
    recorder: Recorder, output: Any, batch: Mapping[str, torch.Tensor], tokens: torch.Tensor, kind: str
) -> torch.Tensor:
    """Record logits and losses; returns this rank's loss."""
    labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
    recorder.add(f"{kind}logits", "every token", output.logits, (*_TOKENS, "word"), {1: tokens})
    each = loss_of_each_token(output.logits, labels)
    recorder.add(f"{kind}loss of each token", "every token", each, _TOKENS, {1: tokens})
    recorder.add(f"{kind}loss", "mean of the batch", mean_over_ranks(output.loss))
    loss: torch.Tensor = output.loss
    return loss


def _steps(run: Run) -> None:
    """Three steps of AdamW with a clipped gradient, checkpointed as the user asks."""
    model, recorder = _wrapped(run), run.recorder
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)
    initial = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = model(**run.batch(step)).loss
        loss.backward()
        recorder.add("loss", f"step {step}", mean_over_ranks(loss))
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
        recorder.add("norm of the gradient", f"step {step}", norm)
        optimizer.step()
        for name, parameter in run.model.named_parameters():
            change = parameter.detach() - initial[name]
            recorder.add("change of parameters", f"step {step} {name}", change, least=0.1 * LEARNING_RATE)
