"""Run the small model in the rank processes of a self-check: forward, backward, evaluation and three steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface.check_model import check_model
from dfa_megatron.huggingface.selfcheck.model import batch_of, build, loss_of_each_token, shifted
from dfa_megatron.huggingface.selfcheck.watch import Watch
from dfa_megatron.loss.deferred import DeferredLogits
from dfa_megatron.selfcheck.record import Recorder
from dfa_megatron.selfcheck.small import ROWS
from dfa_megatron.selfcheck.train import ADAM_EPS, LEAST_STEP, record_steps

LEARNING_RATE, CLIP = 1e-2, 1.0
"""Steps that are large beside the rounding of weights."""
_TOKENS = ("sample", "token")


@dataclass(frozen=True, slots=True)
class Run:
    """Hold what a section needs; `ranks` run, `asked` are those of the case, and `whole` is the one-rank run."""

    model: Any
    recorder: Recorder
    ranks: int
    asked: int
    words: int
    whole: bool

    @property
    def tokens(self) -> torch.Tensor:
        """The global indices of this rank's tokens."""
        return tokens_of(self.ranks, self.asked)

    def batch(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the batch that a training script gives to its model."""
        whole = batch_of(self.words, self.asked, seed)
        return whole if self.whole else dfa_hf.shard_batch(whole)


def tokens_of(ranks: int, asked: int, rank: int | None = None) -> torch.Tensor:
    """Return the global indices of a rank's tokens, computed here a second time; None for this rank."""
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
        watch.of_states(model)
        watch.on = section != "three steps"
        (_steps if section == "three steps" else _passes)(run)


def _wrapped(run: Run) -> Any:
    """Wrap the model in PyTorch's DDP, which averages gradients over all ranks; one rank has the model itself."""
    return run.model if run.whole else DistributedDataParallel(run.model, find_unused_parameters=True)


def mean_over_ranks(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the mean of a number over a group's ranks, as a script would print it."""
    value = value.detach().clone()
    dist.all_reduce(value, group=group)
    return value / dist.get_world_size(group)


def _passes(run: Run) -> None:
    """Run one forward and backward and record every tensor of interest; then evaluate."""
    model, recorder = _wrapped(run), run.recorder
    output = model(**run.batch(0))
    record_forward(recorder, output, run.batch(0), run.tokens)
    output.loss.backward()
    record_gradients(recorder, {name: gradient_of(x) for name, x in run.model.named_parameters()})
    model.eval()
    with torch.no_grad():
        record_forward(recorder, model(**run.batch(1)), run.batch(1), run.tokens, "evaluation: ")


def gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient; zeros where no token used the parameter, as an expert's."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def record_gradients(recorder: Recorder, gradients: Mapping[str, torch.Tensor]) -> None:
    """Record the gradients of all parameters, the last layer's first."""
    least = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in reversed(list(gradients.items())):
        recorder.add("gradients of parameters", name, gradient, least=least)


def record_forward(
    recorder: Recorder,
    output: Any,
    batch: Mapping[str, torch.Tensor],
    tokens: torch.Tensor,
    kind: str = "",
    number: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Record logits and losses of a batch, or of one micro-batch of several, which the ranks of `group` share."""
    labels = batch["shift_labels"] if "shift_labels" in batch else shifted(batch["labels"])
    name = "every token" if number is None else f"micro-batch {number}"
    logits = output.logits.whole() if isinstance(output.logits, DeferredLogits) else output.logits
    recorder.add(f"{kind}logits", name, logits, (*_TOKENS, "word"), {1: tokens})
    each = loss_of_each_token(logits, labels)
    recorder.add(f"{kind}loss of each token", name, each, _TOKENS, {1: tokens})
    of, which = ("loss", "mean of the batch") if number is None else ("loss of each micro-batch", name)
    recorder.add(f"{kind}{of}", which, mean_over_ranks(output.loss, group))


def _steps(run: Run) -> None:
    """Run three steps of AdamW with a clipped gradient, checkpointed as the user asks."""
    model = _wrapped(run)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS)

    def step(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**run.batch(number)).loss
        loss.backward()
        run.recorder.add("loss", f"step {number}", mean_over_ranks(loss))
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), CLIP)
        optimizer.step()
        return norm

    record_steps(run.recorder, lambda: whole_parameters(run.model), step, least=LEAST_STEP * LEARNING_RATE)


def whole_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor, dict[int, torch.Tensor]]]:
    """Yield the parameters of a model that every rank holds whole, as `selfcheck.train.Parameters`."""
    return ((name, parameter, {}) for name, parameter in model.named_parameters())
