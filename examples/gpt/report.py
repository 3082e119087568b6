"""Report on rank 0: a progress bar, a log in JSON lines, a picture of the loss, saved memory and messages."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gpt.errors import user_error_if_impossible
from gpt.flags import Sizes
from gpt.loop import Step
from gpt.saved import Saved
from gpt.text import Tokens

SMOOTH = 5
"""The picture's smooth line is the mean over this number of steps on either side."""

LAST_STEPS = 20
"""The final loss is the mean of this number of last steps, because each step sees another text."""


class Report:
    """Report one run from rank 0, and write log.jsonl, loss.png and summary.txt into one folder."""

    def __init__(
        self, args: argparse.Namespace, sizes: Sizes, tokens: Tokens, device: torch.device, found: Saved | None
    ) -> None:
        self.args, self.sizes = args, sizes
        self.folder = Path(args.save_report)
        self.steps: list[Step] = []
        self._log = (self.folder / "log.jsonl").open("ab" if found else "wb", buffering=0)
        self._console = Console()
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._say(
            f"{tokens.name}: {len(tokens):,} tokens. {args.num_layers} layers, hidden {args.hidden_size}, "
            f"{args.num_attention_heads} heads, sequences of {args.seq_length:,} tokens, "
            f"{args.seq_length // sizes.context:,} per rank. Ranks: {sizes.context_name}, {place}, "
            f"{'bfloat16' if sizes.bf16 else 'float32'}."
        )
        if found:
            self._say(f"Going on after step {found.step}, from {found.folder}.")
        self._write({"event": "start", "data": tokens.name, "device": place, **vars(args)})
        self._bar = Progress(
            TextColumn("loss {task.fields[loss]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=args.train_iters, loss="  -  ", speed=0.0)
        self._bar.start()

    def tell(self, step: Step) -> None:
        """Log one step and move the bar; without a terminal, print a line at every log interval."""
        self.steps.append(step)
        self._write({"event": "step", **step})
        self._bar.update(
            self._task, completed=step["step"], loss=f"{step['loss']:.3f}", speed=step["tokens_per_second"]
        )
        number = int(step["step"])
        due = number % self.args.log_interval == 0 or len(self.steps) == 1 or number == self.args.train_iters
        if due and not self._console.is_terminal:
            left = step["seconds"] / len(self.steps) * (self.args.train_iters - number)
            self._say(
                f"step {number}/{self.args.train_iters}  loss {step['loss']:.3f}  "
                f"{step['tokens_per_second']:,.0f} tokens/s  {left:.0f} s left"
            )

    def finish(self, counters: list[dict[str, int]]) -> None:
        """Write the summary and the picture from the counters of every rank."""
        self._bar.stop()
        self._write({"event": "end", "final_loss": self.final_loss, "counters": counters})
        text = "\n".join([*self._summary(), "", self._grid(), "", *self._kept(counters[0]), "", *self._moved(counters)])
        with user_error_if_impossible(f"write summary.txt and loss.png into {self.folder}"):
            (self.folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
            draw_loss(self.steps, self.folder / "loss.png", title=f"{self.sizes.context} ranks share each sequence")
        if self.args.save:
            save, step = self.args.save, self.steps[-1]["step"]
            goes_on = f"; --load {save} goes on from it" if step < self.args.train_iters else ""
            text += f"\n\n{save}: a checkpoint of step {step}{goes_on}"
        self._say(f"{text}\n\n{self.folder}: loss.png, log.jsonl, summary.txt", soft_wrap=True)

    def close(self) -> None:
        """Give the terminal back and close the log; safe to call twice."""
        with contextlib.suppress(OSError):  # a full disk was reported before
            self._bar.stop()
        self._log.close()

    @property
    def final_loss(self) -> float:
        """Mean loss of the last steps."""
        last = [step["loss"] for step in self.steps[-LAST_STEPS:]]
        return sum(last) / len(last)

    def _say(self, text: str, *, soft_wrap: bool = False) -> None:
        with user_error_if_impossible("write to the standard output"):
            self._console.print(text, markup=False, highlight=False, soft_wrap=soft_wrap)

    def _write(self, record: dict[str, Any]) -> None:
        with user_error_if_impossible(f"write {self._log.name}"):
            self._log.write(json.dumps(record).encode() + b"\n")

    def _summary(self) -> list[str]:
        first, last = self.steps[0], self.steps[-1]
        later = self.steps[1:] or self.steps
        speed = sum(step["tokens_per_second"] for step in later) / len(later)
        averaged = min(LAST_STEPS, len(self.steps))
        return [
            f"loss {first['loss']:.3f} -> {self.final_loss:.3f} (mean of the last {averaged} of {len(self.steps)} "
            f"steps) in {last['seconds']:.0f} s, {speed:,.0f} tokens/s"
        ]

    def _grid(self) -> str:
        from dfa_megatron import draw
        from dfa_megatron.runtime.prepare import in_use

        plan = in_use()[-1].plan
        return f"schedule: {plan}\n{draw(plan, style='text')}"

    def _kept(self, counters: dict[str, int]) -> list[str]:
        calls = len(self.steps) * self.sizes.micro_batches * self.args.num_layers // self.sizes.pipeline
        forwards, replays = counters["attention_forwards"], counters["replays"]
        lines = [
            f"attention ran {forwards} times for {calls} layers x micro-batches of rank 0: {forwards / calls:.2f} each"
        ]
        if replays:
            kept, whole = counters["remat_bytes"] / replays, self._input_bytes()
            lines += [
                f"kept per layer and micro-batch: its input {whole / 2**20:.2f} MiB, attention's out and lse "
                f"{kept / 2**20:.2f} MiB: {(kept + whole) / whole:.2f} times a hidden state",
                f"recomputed: the rest of the layer; attention was taken from what was kept {replays} times",
            ]
        elif forwards > calls:
            lines.append("recomputed: the whole layer, attention and its messages included (Megatron's own checkpoint)")
        else:
            lines.append("nothing was recomputed: every layer kept all that its backward pass needs")
        return lines

    def _input_bytes(self) -> int:
        """Return the bytes of one layer's input on one rank, which a checkpointed layer always saves."""
        rows = self.args.seq_length // self.sizes.context
        if self.args.sequence_parallel:
            rows //= self.sizes.tensor
        return int(rows * self.args.micro_batch_size * self.args.hidden_size * (2 if self.sizes.bf16 else 4))

    def _moved(self, counters: list[dict[str, int]]) -> list[str]:
        steps = len(self.steps)
        lines = ["sent by attention, MiB per step:", "rank  forward  backward  messages"]
        for rank, row in enumerate(counters):
            messages = (row["forward_messages"] + row["backward_messages"]) / steps
            forward, backward = (row[f"{phase}_bytes"] / steps / 2**20 for phase in ("forward", "backward"))
            lines.append(f"{rank:4d} {forward:8.2f} {backward:9.2f} {messages:9.1f}")
        return lines


def draw_loss(steps: list[Step], path: Path, *, title: str) -> None:
    """Draw the loss of every step, smoothed over a few steps either side, and its mean over the last, as a PNG."""
    from matplotlib.figure import Figure

    numbers = [step["step"] for step in steps]
    losses = [step["loss"] for step in steps]
    near = [losses[max(0, at - SMOOTH) : at + SMOOTH + 1] for at in range(len(losses))]
    last = losses[-LAST_STEPS:]
    final = sum(last) / len(last)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(numbers, losses, color="#9db8d9", linewidth=1, label="each step")
    axes.plot(numbers, [sum(some) / len(some) for some in near], color="#1f4e8c", linewidth=2, label="smoothed")
    axes.hlines(final, numbers[-len(last)], numbers[-1], color="#c2410c", linewidth=2, label=f"final: {final:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
