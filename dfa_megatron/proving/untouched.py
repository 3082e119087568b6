"""Leave a job as it was: gradients, buffers, modes, dropout and the random state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dfa_megatron.proving.job import Job


@contextmanager
def untouched(job: Job) -> Iterator[None]:
    """Train without dropout inside, and restore everything on leaving; weights never change, as nothing steps."""
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
