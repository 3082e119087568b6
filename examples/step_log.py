"""One line for each training step, as Megatron and torchtitan print it, and the same numbers for TensorBoard."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

PEAK_TFLOPS = {"A100": 312, "H100 PCIe": 756, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "GB200": 2250}
"""Dense bfloat16 rates by NVIDIA's data sheets, for words of a GPU's name."""


def training_flops(config: Any, parameters: int, tokens: int, seq_length: int) -> float:
    """Return the operations of a training step, forward and backward, without what checkpointing repeats.

    6 · parameters · tokens, and for each causal attention 6 · heads · head_dim · seq_length · tokens, as Megatron and
    torchtitan count (PaLM, appendix B; half of the pairs are masked).

    Args:
        config: of transformers or of Megatron-Core; it names layers, heads and their width.
        parameters: that a token meets: without embeddings that are looked up, and without experts that it skips.
        tokens: of the step, of all ranks.
        seq_length: of a document.
    """
    layers, heads = (
        _first(config, *names) for names in (("num_hidden_layers", "num_layers"), ("num_attention_heads",))
    )
    width = _first(config, "head_dim", "kv_channels") or _first(config, "hidden_size") // heads
    return 6.0 * tokens * (parameters + layers * heads * width * seq_length)


def _first(config: Any, *names: str) -> int:
    return next((int(found) for name in names if (found := getattr(config, name, None))), 0)


class StepLog:
    """Print a line a step on rank 0: loss, gradient norm, ms, tokens/s, TFLOP/s and MFU of a GPU, and peak memory::

        log = StepLog(tokens=ranks * seq_length, tensorboard=args.tensorboard)
        ...
        log.step(loss, grad_norm=norm)

    Args:
        tokens: of a step, of all ranks.
        flops: of a step, of all ranks: `training_flops`. 0 leaves TFLOP/s and MFU out.
        tensorboard: a folder for TensorBoard's files, which needs the package tensorboard; None writes none.
        every: steps of which one is printed, the first and each that this number divides.
    """

    def __init__(self, *, tokens: int, flops: float = 0.0, tensorboard: str | None = None, every: int = 1) -> None:
        joined = dist.is_initialized()
        self.ranks, self.is_first = (dist.get_world_size(), dist.get_rank() == 0) if joined else (1, True)
        self.tokens, self.flops, self.every, self.number = tokens, flops, every, 0
        self.writer: Any = None
        if tensorboard and self.is_first:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(tensorboard)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        self.peak = next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)
        self.before = time.perf_counter()

    def step(self, loss: torch.Tensor | float, **more: torch.Tensor | float) -> dict[str, float]:
        """End a step: return its numbers, and on rank 0 print and write them.

        Reading the loss makes the host wait for the step, so that the time is right.

        Args:
            loss: the mean of all ranks.
            more: other numbers by name, such as grad_norm or those of `dfa_megatron.stats()`.
        """
        found = {"loss": float(loss), **{name: float(x) for name, x in more.items()}}
        now = time.perf_counter()
        seconds, self.before, self.number = now - self.before, now, self.number + 1
        found |= {"ms": 1e3 * seconds, "tokens_per_s": self.tokens / seconds}
        if self.flops:
            found["tflops"] = self.flops / seconds / self.ranks / 1e12
            if self.peak:
                found["mfu_percent"] = 100 * found["tflops"] / self.peak
        if torch.cuda.is_available():
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if self.is_first and (self.number == 1 or self.number % self.every == 0):
            print(f"step {self.number:4d}", *(f"{name} {_short(x)}" for name, x in found.items()), sep="  ", flush=True)
        for name, x in found.items() if self.writer else ():
            self.writer.add_scalar(name, x, self.number)
        return found


def _short(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"
