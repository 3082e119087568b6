"""Run the texts of a proof over the ranks, alone and with noise, and judge them; alike on every rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

import torch
import torch.distributed as dist

from dfa_megatron.errors import ProofError, UnsupportedError
from dfa_megatron.proving.job import Job, texts
from dfa_megatron.proving.recorder import gathered, record
from dfa_megatron.proving.verdict import Proof, Row, judge, merged


def examine(job: Job, tokens: int | None = None) -> Proof:
    """Compare many ranks with one, print the table on rank 0 and return it; a collective call of all ranks.

    Args:
        job: the model, ready to train.
        tokens: of a text, at least; see `texts`.

    Raises:
        ProofError: something differs, on every rank, with the table.
        UnsupportedError: the model cannot run the texts.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    proof, begin = Proof(job.title, job.ranks), time.perf_counter()
    rows: list[Row] = []
    with _untouched(job):
        made = texts(job, tokens)
        for number, text in enumerate(made):
            try:
                got = record(job, text)
            except UnsupportedError as error:
                job.clear()
                if number == 0:
                    raise
                proof.unseen.append(f"{text.name}: {error}")
                continue
            with job.alone():
                want = record(job, text, alone=True, choices=got.choices)
                noise = record(job, text, alone=True, choices=got.choices, noise=True)
            rows += judge(f"{text.name}, {len(text.ids)} tokens", got, want, noise, rank)
    everyone = [([astuple(row) for row in rows], time.perf_counter() - begin)]
    if world > 1:
        everyone = gathered(everyone[0], job.device)
    proof.rows = merged([[Row(*row) for row in each] for each, _ in everyone])
    proof.seconds = max(seconds for _, seconds in everyone)
    length = len(made[0].ids)
    proof.unseen += [f"what lies beyond a window of {x} tokens" for x in sorted({*job.windows()}) if x >= length]
    proof.unseen += ["dropout, which was off, and the optimizer", *job.unseen()]
    if proof.difference:
        raise ProofError(str(proof))
    if rank == 0:
        print(proof, flush=True)  # asked for, so not left to the level of a log
    return proof


@contextmanager
def _untouched(job: Job) -> Iterator[None]:
    """Train without dropout inside, and leave gradients, buffers, modes, dropout and the random state as they were.

    Weights never change, as nothing steps.
    """
    modules = [module for model in job.models for module in model.modules()]
    modes = [(module, module.training) for module in modules]
    rates = [
        (module, name, value)
        for module in modules
        for name, value in vars(module).items()
        if type(value) is float and value and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]
    buffers = [(x, x.detach().clone()) for module in modules for x in module._buffers.values() if x is not None]
    gradients = [(x, x.grad) for _, x in job.parameters()]
    devices = [job.device] if job.device.type == "cuda" else []
    with torch.random.fork_rng(devices), job.kept():
        for module in modules:
            module.training = True
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        for parameter, _ in gradients:
            parameter.grad = None
        try:
            yield
        finally:
            job.clear()
            for module, mode in modes:
                module.training = mode
            for module, name, value in rates:
                setattr(module, name, value)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, gradient in gradients:
                parameter.grad = gradient
