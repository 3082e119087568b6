"""Measures a Megatron model's loss, whole and by tiles of tokens: milliseconds and peak memory of GPTModel's head.

    torchrun --nproc-per-node 1 -m benchmarks.tiled_loss --out tiled_loss.json
    torchrun --nproc-per-node 2 -m benchmarks.tiled_loss --out tp2.json           # ranks share weights and vocabulary
    torchrun --nproc-per-node 2 -m benchmarks.tiled_loss --toy --out toy.json     # on CPU, to see that it runs

The model is a last pipeline stage without layers: hidden states go to its output layer and loss. Modes: `off` is
Megatron's loss, `fused` its own fusion of the cross-entropy, a number `loss_tile` with so many tokens. Passes: `train`
is forward and backward, `logprobs` forward only, `entropy` the log-probabilities and entropy of `scores_of`. `more_gib`
is the peak beside weights and hidden states, `predicted_gib` what the package's account says of one rank. Losses and
gradients are compared with float64 first; a mode that is wrong is not timed. Each row is written when it is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.correctness import too_far
from benchmarks.attention.failures import attempt
from benchmarks.bench import Call, benchmark, clear_memory, flags_of, median_ms, peak_gib, relative
from benchmarks.megatron_common import MODES, Shape, arrange, gpt_model, make_config, seed
from benchmarks.memory_account import head_bytes
from dfa_megatron import MegatronConfig
from dfa_megatron.flags import flag
from dfa_megatron.loss import scores_of

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-4}


PASSES = ("train", "logprobs", "entropy")


@dataclass(frozen=True)
class Sizes:
    """What is timed."""

    modes: tuple[str, ...] = flag(("4096", "16384", "off", "fused"), "of the loss", metavar="off|fused|TOKENS")
    tokens: tuple[int, ...] = flag((65536, 131072), "of all ranks")
    vocab_size: int = flag(128256, "of the head")
    hidden_size: int = flag(4096, "of the model")
    check_tokens: int = flag(1024, "in the comparison with float64")
    repeats: int = flag(5, "calls of a time")
    toy: bool = flag(False, "sizes that a CPU can do")
    out: Path | None = flag(None, "the figures, as JSON")


TOY = {"modes": ("4", "off"), "tokens": (48,), "check_tokens": 32, "repeats": 2, "vocab_size": 64, "hidden_size": 32}


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank; return the exit status, 1 if a mode was wrong."""
    sizes = flags_of(Sizes, __doc__, argv)
    sizes = replace(sizes, **TOY) if sizes.toy else sizes  # type: ignore[arg-type]
    with benchmark(sizes, 120.0, rows=[]) as (world, report):
        arrange(world.size)
        for mode in sizes.modes:
            seed()
            found = attempt(world, partial(check, sizes, mode, world.device))
            report.add({"mode": mode, "pass": "check", **found})
            for tokens in () if found.get("wrong") else sizes.tokens:
                for name in PASSES if mode.isdecimal() else PASSES[:2]:
                    seed()
                    figures = attempt(world, partial(measure, sizes, mode, name, tokens, world.device))
                    report.add({"mode": mode, "pass": name, "tokens": tokens, **figures})
    return int(any(row.get("wrong") for row in report.content["rows"]))


def build(sizes: Sizes, mode: str, device: torch.device) -> Any:
    """Return the head of a GPTModel."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dfa_megatron.megatron import distribute_attention

    config = make_config(Shape(sizes.hidden_size, 4, 4, 64), 1, MODES["tp-full"], fusion=False)
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = mode == "fused", "native"
    spec: Any = TransformerBlockSubmodules(layer_specs=[])
    if mode.isdecimal():
        options = MegatronConfig(data_layout="contiguous", loss_tile=int(mode))
        spec = distribute_attention(spec, config, config=options)
    given = {"pre_process": False, "position_embedding_type": "none"}
    model = gpt_model(config, spec, sizes.vocab_size, max(sizes.tokens), **given)
    return model.to(device, config.params_dtype)


def draw(sizes: Sizes, model: Any, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states (this rank's tokens, 1, hidden size) and labels (1, tokens), the same on all ranks."""
    generator = torch.Generator(device).manual_seed(tokens)
    shape, dtype = (tokens, 1, sizes.hidden_size), model.config.params_dtype
    hidden = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    labels = torch.randint(sizes.vocab_size, (1, tokens), generator=generator, device=device)
    if model.config.sequence_parallel:
        hidden = hidden.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return hidden, labels


def losses_of(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return minus the log-probability of each label, (1, tokens)."""
    model.set_input_tensor(hidden)
    losses: torch.Tensor = model(None, None, None, labels=labels)
    return losses


def check(sizes: Sizes, mode: str, device: torch.device) -> dict[str, Any]:
    """Return how far losses, gradients and entropies are from float64, and what is wrong."""
    model = build(sizes, mode, device).train()
    (weight,) = [parameter for name, parameter in model.named_parameters() if "output_layer" in name]
    hidden, labels = draw(sizes, model, sizes.check_tokens, device)
    shares = [torch.empty_like(weight.data) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, weight.data)
    parts = [torch.empty_like(hidden) for _ in shares]
    dist.all_gather(parts, hidden)
    exact = torch.cat(shares).double().requires_grad_()
    rows = (torch.cat(parts) if model.config.sequence_parallel else hidden).double().requires_grad_()
    logp = (rows[:, 0] @ exact.T).log_softmax(-1)
    want = -logp.gather(-1, labels[0][:, None])[:, 0]
    gradients = torch.autograd.grad(want.sum(), (rows, exact))
    leaf = hidden.clone().requires_grad_()
    losses = losses_of(model, leaf, labels)
    losses.sum().backward()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = gradients[0].chunk(ranks)[rank] if model.config.sequence_parallel else gradients[0]
    pairs = {"loss": (losses[0], want), "dhidden": (leaf.grad, mine)}
    pairs["dweight"] = (weight.grad, gradients[1].chunk(ranks)[rank])
    if mode.isdecimal():
        with torch.no_grad(), scores_of(model) as scores:
            losses_of(model, hidden, labels)
        pairs["entropy"] = (scores.entropy.flatten(), -(logp.exp() * logp).sum(-1))
    errors = {name: relative(a, b) for name, (a, b) in pairs.items()}
    said = too_far(errors, TOLERANCE[hidden.dtype])
    failed = torch.tensor(float(bool(said)), device=device)
    dist.all_reduce(failed)
    return {"errors": errors, "wrong": said or ("on another rank" if failed else "")}


def measure(sizes: Sizes, mode: str, name: str, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and memory of a pass."""
    model = build(sizes, mode, device).train(name == "train")
    hidden, labels = draw(sizes, model, tokens, device)
    step = step_of(name, model, hidden, labels)
    clear_memory()
    before = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    elapsed = median_ms(step, device, repeats=sizes.repeats)
    figures = {"ms": round(elapsed, 3), "more_gib": round(peak_gib() - before, 3)}
    if name == "train" and dist.get_world_size() == 1:
        tile, item = int(mode) if mode.isdecimal() else None, hidden.element_size()
        account = head_bytes(tokens, sizes.vocab_size, sizes.hidden_size, tile, itemsize=item)
        figures["predicted_gib"] = round(account.together / 2**30, 3)
    return figures


def step_of(name: str, model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> Call:
    """Return a pass."""

    def step() -> None:
        if name == "train":
            losses_of(model, hidden.requires_grad_(), labels).sum().backward()
            hidden.grad = None
            model.zero_grad(set_to_none=True)
            return
        with torch.no_grad(), scores_of(model) if name == "entropy" else contextlib.nullcontext():
            losses_of(model, hidden, labels)

    return step


if __name__ == "__main__":
    raise SystemExit(main())
