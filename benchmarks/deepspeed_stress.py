"""Looks for what only GPUs show: our messages beside ZeRO-3's gathers in every order, and checkpoints on the host.

    torchrun --nproc-per-node 4 -m benchmarks.deepspeed_stress --out stress.json
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m benchmarks.deepspeed_stress --dry-run

orders: many small ZeRO-3 steps while random ranks are held up on the device, so that gathers, reductions and our
messages meet in ever new orders; the losses must be those of the same steps with every kernel waited for. A deadlock
ends the run after --timeout seconds with an error.
forms: every form of checkpointing, DeepSpeed's cpu_checkpointing among them, must give the gradients of none.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import safe_get_full_grad

from benchmarks.bench import Report, flags_of, leave, wait
from benchmarks.deepspeed_common import engine_of, held, join, made_with, model_of, optimizer
from benchmarks.deepspeed_shapes import Shape
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.flags import flag

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"checkpoint": "full"}, {}),
    "remat": ({"checkpoint": "remat"}, {}),
    "remat, re-entrant": ({"checkpoint": "remat", "reentrant": True}, {}),
    "remat, attention on the host": ({"checkpoint": "remat", "remat_offload": True}, {}),
    "full, inputs on the host": ({"checkpoint": "full"}, {"cpu_checkpointing": True}),
    "remat, inputs on the host": ({"checkpoint": "remat"}, {"cpu_checkpointing": True}),
    "remat, both on the host": ({"checkpoint": "remat", "remat_offload": True}, {"cpu_checkpointing": True}),
}
"""The block, and DeepSpeed's section activation_checkpointing."""


@dataclass(frozen=True)
class Job:
    """How long, and with what."""

    steps: int = flag(500, "with random ranks held up")
    compared: int = flag(50, "steps that are run a second time, with waiting")
    length: int = flag(2048, "of whole sequences, times the ranks")
    layers: int = flag(6, "of the model")
    schedule: str = flag("auto", "of ours")
    kernel: str = flag("auto", "of ours")
    transport: str = flag("auto", "of ours")
    timeout: float = flag(90.0, "seconds after which a deadlock is an error")
    out: Path | None = flag(None, "the findings, as JSON")
    dry_run: bool = flag(False, "tiny sizes, on a CPU too")


ZERO = {
    "overlap_comm": True,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 1_000_000,
    "stage3_max_live_parameters": 2_000_000,
    "reduce_bucket_size": 500_000,
}
"""All parameters are divided, so that every use of one is a gather."""


def start(job: Job, block: dict[str, Any], section: dict[str, Any], lr: float) -> Any:
    """Build a small model."""
    shape = Shape(32, 64, 4, 2, head_dim=8) if job.dry_run else Shape(512, 1024, 4, 2)
    model = model_of(shape, layers=job.layers, vocabulary=512, longest=job.length * dist.get_world_size())
    options = {"schedule": job.schedule, "kernel": job.kernel, "transport": job.transport, **block}
    return engine_of(model, optimizer(False, True, lr)[0], ZERO, activation_checkpointing=section, **options)


def batch_of(engine: Any, job: Job, seed: int) -> dict[str, torch.Tensor]:
    """Return this rank's tokens of a sequence that repeats itself, so that there is something to learn."""
    length = job.length * dist.get_world_size()
    words = torch.randint(0, 512, (1, 64), generator=torch.Generator().manual_seed(seed % 8))
    ids = words.repeat(1, length // 64 + 1)[:, :length].to(engine.device)
    return dfa_ds.shard_batch({"input_ids": ids, "labels": ids}, group=dfa_ds.mesh_of(engine).group)


def hold_up(random_numbers: random.Random) -> None:
    """Keep this rank's device or host busy for up to some milliseconds, or not at all."""
    kind = random_numbers.randrange(4)
    if kind == 1 and torch.cuda.is_available():
        torch.cuda._sleep(random_numbers.randrange(10_000_000))
    if kind == 2:
        time.sleep(random_numbers.random() * 0.004)


def train(job: Job, steps: int, *, disturbed: bool) -> list[float]:
    """Return the mean loss of each step; disturbed, or with every step waited for."""
    engine = start(job, {"checkpoint": "remat"}, {}, lr=3e-4)
    noise = random.Random(dist.get_rank())
    handles = []
    if disturbed:
        for module in engine.module.modules():  # between any two gathers, forward and in the recompute
            handles.append(
                module.register_forward_pre_hook(lambda *_: hold_up(noise) if noise.random() < 0.02 else None)
            )
    losses = []
    for step in range(steps):
        loss = engine(**batch_of(engine, job, step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
        if not disturbed:
            wait()
    for handle in handles:
        handle.remove()
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    engine.destroy()
    return [float(value) for value in mean / dist.get_world_size()]


def orders(job: Job) -> dict[str, Any]:
    """Compare a disturbed run with a calm one."""
    begin = time.perf_counter()
    disturbed = train(job, job.steps, disturbed=True)
    calm = train(job, job.compared, disturbed=False)
    far = max(abs(a - b) / b for a, b in zip(disturbed, calm, strict=False))
    learned = disturbed[-1] < disturbed[0]
    assert far < 0.05, f"the disturbed run's losses are {far:.1%} from the calm one's"
    assert learned or job.dry_run, f"the loss went from {disturbed[0]} to {disturbed[-1]}"
    return {
        "steps": job.steps,
        "largest_relative_difference": far,
        "first_and_last_loss": [disturbed[0], disturbed[-1]],
        "seconds": time.perf_counter() - begin,
    }


def gradients(job: Job, block: dict[str, Any], section: dict[str, Any]) -> tuple[list[torch.Tensor], float]:
    """Return the second micro-batch's gradients, when ZeRO-3 knows the order of its gathers, and its peak in GiB."""
    before = held()
    engine = start(job, block, section, lr=0.0)
    batch = batch_of(engine, job, 0)
    for _ in range(2):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(**batch).loss)
        found = [safe_get_full_grad(parameter).float().cpu() for parameter in engine.module.parameters()]
        engine.step()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if torch.cuda.is_available() else 0.0
    engine.destroy()
    checkpointing.configure(None, checkpoint_in_cpu=False)  # it is kept in the process
    return found, peak


def forms(job: Job) -> dict[str, Any]:
    """Compare the gradients of every form of checkpointing with those of none."""
    want, peak = gradients(job, {}, {})
    report: dict[str, Any] = {"none": {"peak_gib": peak}}
    for name, (block, section) in FORMS.items():
        if section and not torch.cuda.is_available():
            continue
        got, peak = gradients(job, block, section)
        far = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(got, want, strict=True))
        report[name] = {"relative_distance": far, "peak_gib": peak}
        assert far < 0.02, f"{name}: gradients are {far:.2%} from those without checkpointing"
    return report


def main() -> None:
    """Run both, and print the findings."""
    job = flags_of(Job, __doc__)
    if job.dry_run:
        job = replace(job, steps=6, compared=3, length=16, layers=2)
    join(job.timeout)
    report = Report(job.out, job, **made_with())
    report.content |= {"forms": forms(job), "orders": orders(job)}
    report.show(report.content)
    report.write()
    leave()


if __name__ == "__main__":
    main()
