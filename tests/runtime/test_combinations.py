"""Everything at once: options drawn at random, in combinations that no other test names, against dense float64.

DFA_COMBINATIONS=500 draws so many for each number of ranks.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dfa_megatron
from dfa_megatron import remat
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.testing.compare import assert_close, dense_attention
from dfa_megatron.testing.memory import nan_memory
from dfa_megatron.testing.workers import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from cases import TOLERANCE, positions
from packs import random_offsets, tokens_of

DRAWS = int(os.environ.get("DFA_COMBINATIONS", "30"))
LAYOUTS = {
    "contiguous": ("auto", "ring", "balanced", "balanced_shared", "greedy"),
    "zigzag": ("auto", "zigzag"),
    "dealt": ("auto", "dealt"),
}
DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)
GPU_KERNELS = ("auto", "flash4", "triton", "aten", "cudnn")
WINDOWS = ((-1, -1), (-1, -1), (0, 0), (5, 0), (40, -1), (-1, 3), (6, 9))
Attend = Callable[..., torch.Tensor]


def no_checkpoint(region: Attend, *inputs: torch.Tensor) -> torch.Tensor:
    return region(*inputs)


CHECKPOINTS = {
    "none": no_checkpoint,
    "full": functools.partial(checkpoint, use_reentrant=False),
    "remat": remat.remat_checkpoint,
    "remat, not re-entrant": functools.partial(checkpoint, use_reentrant=False, context_fn=remat.context_fn),
    "remat on the host": functools.partial(remat.remat_checkpoint, offload=True),
}


class Drawn:
    """One attention: its options, inputs of the whole sequence or pack, and what dense attention makes of them."""

    def __init__(self, draw: random.Random, ranks: int, device: str = "cpu") -> None:
        self.device, on_gpu = device, device != "cpu"
        self.packed = draw.random() < 0.5
        layout = draw.choice(list(LAYOUTS) if self.packed else ["contiguous", "zigzag"])
        local = draw.choice([33, 64, 130, 256] if on_gpu else [1, 2, 7, 12, 20]) * (2 if layout == "zigzag" else 1)
        self.tokens = ranks * local
        self.offsets = random_offsets(self.tokens, draw) if self.packed else (0, self.tokens)
        kv_heads = draw.choice([1, 2, 3])
        self.heads, batch = kv_heads * draw.choice([1, 2, 4]), 1 if self.packed else draw.choice([1, 2, 3])
        dim = 128 if on_gpu else draw.choice([4, 9, 16])
        dim_v = dim if draw.random() < 0.7 or self.packed or on_gpu else draw.choice([5, 8])
        self.dtype = torch.bfloat16 if on_gpu else draw.choice(DTYPES)
        self.causal, self.window = draw.random() < 0.6, draw.choice(WINDOWS)
        self.softcap = draw.choice([0.0, 0.0, 0.0, 2.0])
        degrees = [d for d in range(1, ranks + 1) if ranks % d == 0 and self.heads % d == 0]
        self.checkpoint = draw.choice(list(CHECKPOINTS))
        self.options: dict[str, Any] = {
            "schedule": draw.choice(LAYOUTS[layout]),
            "layout": layout,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "kernel": draw.choice(GPU_KERNELS if on_gpu else ("auto", "reference", "cpu")),
            "transport": draw.choice(["auto", "p2p", "copy_engine"]) if on_gpu else "auto",
            "cuda_graph": on_gpu and draw.random() < 0.1,
            "ulysses_degree": draw.choice([1, 1, draw.choice([0, *degrees])]),
            "wire_dtype": draw.choice(["input", "float32"]),
            "deterministic": draw.random() < 0.3,
            "verify": draw.choice(["on", "off"]),
            "softmax_scale": draw.choice([None, 0.3]),
        }
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))

        def rows(count: int, width: int) -> torch.Tensor:
            shape = (self.tokens, batch, count, width) if draw.random() < 0.3 else (batch, self.tokens, count, width)
            x = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, self.dtype)
            return x.transpose(0, 1) if shape[0] == self.tokens and shape[1] == batch else x

        self.qkv = rows(self.heads, dim), rows(kv_heads, dim), rows(kv_heads, dim_v)
        self.dout = rows(self.heads, dim_v)
        numbers = functools.partial(torch.randn, self.heads, generator=generator, dtype=torch.float64)
        self.sinks = numbers().to(device) if draw.random() < 0.4 else None
        self.slopes = (numbers().abs() / 4).float().to(device) if draw.random() < 0.3 and not self.softcap else None

    def dense(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """out and the gradients of q, k, v, and sinks if there are some."""
        leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in (*self.qkv, self.sinks) if x is not None]
        sinks = leaves[3] if self.sinks is not None else None
        mask = {"causal": self.causal, "window_size": self.window, "softcap": self.softcap}
        outs = []
        for lo, hi in pairwise(self.offsets):
            at = torch.arange(hi - lo, dtype=torch.float64, device=self.device)
            bias = None if self.slopes is None else -self.slopes.double()[:, None, None] * (at[:, None] - at).abs()
            out, _ = dense_attention(
                *(x[:, lo:hi] for x in leaves[:3]), sinks=sinks, bias=bias,
                softmax_scale=self.options["softmax_scale"], **mask,
            )  # fmt: skip
            outs.append(out)
        out = torch.cat(outs, 1)
        return out.detach(), list(torch.autograd.grad(out, leaves, self.dout.double()))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """This rank's out, with a batch dimension."""
        given = {**self.options, "sinks": sinks, "alibi_slopes": self.slopes}
        if not self.packed:
            out: torch.Tensor = dfa_megatron.dist_flash_attn_func(q * 1.0, k * 1.0, v * 1.0, **given)
            return out * 1.0
        out = dfa_megatron.dist_flash_attn_varlen_func(q[0] * 1.0, k[0] * 1.0, v[0] * 1.0, self.offsets, **given)
        return out[None] * 1.0

    def rows(self, rank: int, ranks: int) -> torch.Tensor:
        """The positions of a rank's tokens."""
        layout = str(self.options["layout"])
        if self.packed:
            return tokens_of(layout, self.offsets, ranks)[rank]
        return positions(layout, self.tokens, ranks)[rank]


def compare(drawn: Drawn, rank: int, ranks: int) -> None:
    """One forward and backward of this rank's rows against the dense ones."""
    want, gradients = drawn.dense()
    at = drawn.rows(rank, ranks)
    shard = [x[:, at].requires_grad_() for x in drawn.qkv]
    sinks = None if drawn.sinks is None else drawn.sinks.clone().requires_grad_()
    out = CHECKPOINTS[drawn.checkpoint](drawn.attend, *shard, sinks)
    out.backward(drawn.dout[:, at])  # re-entrant checkpoints take no other
    got = [x.grad for x in (*shard, sinks) if x is not None]
    tolerance = 4 * TOLERANCE[drawn.dtype]
    floor = tolerance * max(1.0, float(drawn.dout.double().norm()))
    assert_close(out, want[:, at], tolerance=tolerance, name="out")
    if sinks is not None and ranks > 1:
        dist.all_reduce(got[3])
    for number, (name, mine) in enumerate(zip(("dq", "dk", "dv", "dsinks"), got, strict=False)):
        whole = gradients[number] if number == 3 else gradients[number][:, at]
        assert float((mine.double() - whole).norm()) <= 4 * floor, f"{name} is off"


def _combinations(rank: int, ranks: int, count: int, device: str = "cpu") -> tuple[int, int]:
    compared = refused = 0
    for number in range(count):
        drawn = Drawn(random.Random(f"{ranks} {number}"), ranks, device)
        try:
            with nan_memory():
                compare(drawn, rank, ranks)
            compared += 1
        except UnsupportedError:
            refused += 1
            gc.collect()  # until then PyTorch 2.6 keeps the hooks of a checkpoint that ended with an error
        except BaseException as error:
            plain = {name: value for name, value in vars(drawn).items() if isinstance(value, (int, str, dict))}
            error.add_note(f"draw {number} of {ranks} ranks: {plain}, offsets {drawn.offsets}")
            raise
    return compared, refused


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_options_drawn_at_random_are_exact_together_or_refused(ranks: int) -> None:
    compared, refused = run_ranks(ranks, _combinations, DRAWS, timeout=60 + 3 * DRAWS)[0]
    assert compared >= DRAWS // 3, f"{refused} of {DRAWS} were refused"


@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)])
def test_options_drawn_at_random_are_exact_together_or_refused_on_gpus(ranks: int) -> None:
    compared, refused = run_ranks(ranks, _combinations, DRAWS, "cuda", cuda=True, timeout=400)[0]  # kernels compile
    assert compared >= DRAWS // 4, f"{refused} of {DRAWS} were refused"
