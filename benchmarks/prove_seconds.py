"""Proves a Llama-shaped model in bfloat16 under ZeRO-3 on all GPUs, then with a planted fault, and says what it took.

    torchrun --nproc-per-node 2 -m benchmarks.prove_seconds --kernel flash4 --out FILE

The fault is one head of the last token that attention leaves 0. The exit status is 1 if a proof says what is not so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.bench import Report, flags_of, leave
from benchmarks.deepspeed_common import engine_of, join, made_with, model_of, optimizer
from benchmarks.deepspeed_shapes import SHAPES
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import ProofError
from dfa_megatron.flags import flag
from dfa_megatron.huggingface import attention_function


@dataclass(frozen=True)
class Job:
    """The model."""

    kernel: str = flag("auto", "of attention")
    layers: int = flag(16, "of the model")
    out: Path | None = flag(None, "the figures, as JSON")
    dry_run: bool = flag(False, "a tiny model, on a CPU too")


def lossy(real: Any) -> Any:
    """Return a function of attention that gives 0 for the first head of the last rank's last token."""

    def lost(*args: Any, **kw: Any) -> torch.Tensor:
        out: torch.Tensor = real(*args, **kw)  # (..., tokens, heads, head_dim)
        kept = torch.ones((*out.shape[-3:-1], 1), dtype=out.dtype, device=out.device)
        kept[-1, 0] = float(dist.get_rank() < dist.get_world_size() - 1)
        return out * kept

    return lost


def main() -> None:
    """Prove twice, and write both tables."""
    job = flags_of(Job, __doc__)
    join(300.0)
    report = Report(job.out, job, **made_with())
    begin = time.perf_counter()
    shape = SHAPES["llama-3-8b"].toy() if job.dry_run else SHAPES["llama-3-8b"]
    model = model_of(shape, layers=job.layers, vocabulary=128 if job.dry_run else 32768, longest=8192)
    engine = engine_of(model, optimizer(False, job.dry_run)[0], {}, kernel=job.kernel)
    built = time.perf_counter() - begin
    proof = dfa_ds.prove(engine)
    report.content |= {"seconds_to_build": built, "seconds": proof.seconds, "proof": str(proof).splitlines()}
    names = ("dist_flash_attn_func", "dist_flash_attn_varlen_func")
    try:
        with patch.multiple(attention_function, **{name: lossy(getattr(attention_function, name)) for name in names}):
            dfa_ds.prove(engine)
    except ProofError as error:
        report.content["planted"] = str(error).splitlines()
    report.show(report.content)
    report.write()
    leave()
    raise SystemExit("planted" not in report.content)


if __name__ == "__main__":
    main()
