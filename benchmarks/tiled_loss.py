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

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Before torch is imported: the environment that Megatron demands.
from benchmarks.megatron_common import MODES, Shape, arrange, attempt, join, make_config, median_ms, peak_gib  # isort: skip
import torch
import torch.distributed as dist

from benchmarks.attention.correctness import too_far
from benchmarks.head_memory import head_bytes
from benchmarks.megatron_layers import note, write
from benchmarks.surroundings import machine
from dfa_megatron import MegatronConfig
from dfa_megatron.loss import scores_of

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 1e-4}


def main(argv: Sequence[str] | None = None) -> int:
    """Run as one rank; return the exit status, 1 if a mode was wrong."""
    args = flags(argv)
    begin = time.perf_counter()
    device = join()
    arrange(dist.get_world_size())
    report: dict[str, Any] = {
        "machine": {"ranks": dist.get_world_size(), **machine()},
        "arguments": vars(args) | {"out": str(args.out)},
        "rows": [],
    }
    wrong = False
    for mode in args.modes:
        found = attempt(partial(check, args, mode, device))
        wrong |= bool(found.get("wrong"))
        note(report, "rows", {"mode": mode, "pass": "check", **found}, args.out)
        for tokens in args.tokens if not found.get("wrong") else ():
            for name in PASSES if mode.isdecimal() else PASSES[:2]:
                figures = attempt(partial(measure, args, mode, name, tokens, device))
                note(report, "rows", {"mode": mode, "pass": name, "tokens": tokens, **figures}, args.out)
    report["seconds"] = round(time.perf_counter() - begin, 1)
    write(report, args.out)
    return int(wrong)


PASSES = ("train", "logprobs", "entropy")


def flags(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="sizes that a CPU can do")
    parser.add_argument("--modes", nargs="+", default=["4096", "16384", "off", "fused"], metavar="off|fused|TOKENS")
    parser.add_argument("--tokens", nargs="+", type=int, default=[65536, 131072])
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--check-tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    if args.toy:
        args.modes, args.tokens, args.check_tokens, args.repeats = ["4", "off"], [48], 32, 2
        args.vocab_size, args.hidden_size = 64, 32
    return args


def build(args: argparse.Namespace, mode: str, device: torch.device) -> Any:
    """Return the head of a GPTModel."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dfa_megatron.megatron import distribute_attention

    config = make_config(Shape(args.hidden_size, 4, 4, 64), 1, MODES["tp-full"], fusion=False)
    config.cross_entropy_loss_fusion, config.cross_entropy_fusion_impl = mode == "fused", "native"
    spec: Any = TransformerBlockSubmodules(layer_specs=[])
    if mode.isdecimal():
        options = MegatronConfig(data_layout="contiguous", loss_tile=int(mode))
        spec = distribute_attention(spec, config, config=options)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.vocab_size,
        max_sequence_length=max(args.tokens),
        pre_process=False,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    return model.to(device, config.params_dtype)


def draw(args: argparse.Namespace, model: Any, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states (this rank's tokens, 1, hidden size) and labels (1, tokens), the same on all ranks."""
    generator = torch.Generator(device).manual_seed(tokens)
    shape, dtype = (tokens, 1, args.hidden_size), model.config.params_dtype
    hidden = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    labels = torch.randint(args.vocab_size, (1, tokens), generator=generator, device=device)
    if model.config.sequence_parallel:
        hidden = hidden.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return hidden, labels


def losses_of(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return minus the log-probability of each label, (1, tokens)."""
    model.set_input_tensor(hidden)
    losses: torch.Tensor = model(None, None, None, labels=labels)
    return losses


def check(args: argparse.Namespace, mode: str, device: torch.device) -> dict[str, Any]:
    """Return how far losses, gradients and entropies are from float64, and what is wrong."""
    model = build(args, mode, device).train()
    (weight,) = [parameter for name, parameter in model.named_parameters() if "output_layer" in name]
    hidden, labels = draw(args, model, args.check_tokens, device)
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
    errors = {name: ((a.double() - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}
    said = too_far(errors, TOLERANCE[hidden.dtype])
    failed = torch.tensor(float(bool(said)), device=device)
    dist.all_reduce(failed)
    return {"errors": errors, "wrong": said or ("on another rank" if failed else "")}


def measure(args: argparse.Namespace, mode: str, name: str, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return milliseconds and memory of a pass."""
    model = build(args, mode, device).train(name == "train")
    hidden, labels = draw(args, model, tokens, device)
    step = {"train": _train, "logprobs": _logprobs, "entropy": _entropy}[name](model, hidden, labels)
    peak_gib(reset=True)
    before = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    elapsed = median_ms(step, warmup=2, repeats=args.repeats)
    figures = {"ms": round(elapsed, 3), "more_gib": round(peak_gib() - before, 3)}
    if name == "train" and dist.get_world_size() == 1:
        tile, item = int(mode) if mode.isdecimal() else None, hidden.element_size()
        account = head_bytes(tokens, args.vocab_size, args.hidden_size, tile, itemsize=item)
        figures["predicted_gib"] = round(account.together / 2**30, 3)
    return figures


def _train(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    hidden.requires_grad_()

    def step() -> None:
        losses_of(model, hidden, labels).sum().backward()
        hidden.grad = None
        model.zero_grad(set_to_none=True)

    return step


def _logprobs(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    return torch.no_grad()(lambda: losses_of(model, hidden, labels))


def _entropy(model: Any, hidden: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad(), scores_of(model):
            losses_of(model, hidden, labels)

    return step


if __name__ == "__main__":
    status = main()
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(status)
