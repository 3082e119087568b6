"""Time the layers of a Qwen3-Next-shaped group on one device: three gated delta nets and one attention.

    python -m benchmarks.recurrence --link-gbs 370 --out recurrence.json      # needs fla-core
    python -m benchmarks.recurrence --device cpu --tokens 256 --kernel transformers --rounds 2

One device plays a rank in the middle of `ranks`. Times are of a forward and a backward, or of a forward alone:

    projections   of a gated delta net, in and out
    conv          its short convolution, with the tokens before the rank's own
    scan          the kernel with nothing coming in; `scan, wider` is the same with a state to come, and reads it
    fold          the fold of all ranks' states, its transpose, and the gradient of M
    attention     one rank's program of the balanced schedule, with a transport that moves nothing

Bytes are exact: what a rank receives per layer, forward and backward together. Their time is bytes over `--link-gbs`,
which `dfa-megatron doctor` measures. Beside them stand what moves if hidden states are brought to zigzag and
back around the attention, and if heads are exchanged for tokens around each gated delta net.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.bench import Call, Flags, benchmark, flags_of, median_ms
from benchmarks.programs import both_phases, draw, prepare
from dfa_megatron.flags import flag
from dfa_megatron.plan.language.layout import by_name
from dfa_megatron.recurrence import Scan, fla_scan
from dfa_megatron.recurrence.fold import fold, fold_back, gradient_of_m
from dfa_megatron.recurrence.local_scan import local_scan
from dfa_megatron.recurrence.share import Share


@dataclass(frozen=True)
class Shapes(Flags):
    """What is timed; the defaults are Qwen3-Next-80B-A3B's."""

    dtype: str = flag("bfloat16", "of the tensors")
    kernel: str = flag("fla", "of the gated delta net", choices=("fla", "transformers"))
    attention_kernel: str = flag("auto", "as in the options")
    tokens: int = flag(32768, "of each rank")
    ranks: tuple[int, ...] = flag((2, 4, 8), "that are played")
    hidden: int = flag(2048, "size")
    key_heads: int = flag(16, "of a gated delta net")
    value_heads: int = flag(32, "of a gated delta net")
    head_dim: int = flag(128, "of a gated delta net")
    width: int = flag(4, "of its convolution")
    attention: tuple[int, int, int] = flag((16, 2, 256), "heads, kv heads and head_dim of the attention")
    layers: int = flag(3, "gated delta nets for one attention")
    link_gbs: float = flag(0.0, "measured, GB/s that a rank receives; 0: bytes only")
    backward: bool = flag(True, "time backwards too; fla refuses its own on Hopper with some versions of Triton")
    rounds: int = flag(10, "calls of each, of which the median counts")

    @property
    def conv_channels(self) -> int:
        """Channels of q, k and v."""
        return (2 * self.key_heads + self.value_heads) * self.head_dim

    @property
    def projected(self) -> int:
        """Channels of q, k, v, the gate, beta and the decay."""
        return self.conv_channels + self.value_heads * (self.head_dim + 2)


def main() -> None:
    """Time every number of ranks, and write what is known by now after every part."""
    shapes = flags_of(Shapes, __doc__)
    torch.manual_seed(0)
    with benchmark(shapes, rows=[]) as (world, report):
        shapes, rows = replace(shapes, device=str(world.device)), report.content["rows"]
        for ranks in shapes.ranks:
            row: dict[str, Any] = {"ranks": ranks} | received(shapes, ranks)
            rows.append(row)
            for name, make in parts(shapes, ranks).items():
                known = rows[0].get(name) if name in SAME_FOR_ALL else None
                row[name] = timed(f"{ranks} ranks, {name}", make, shapes) if known is None else known
                report.write()
            row |= summary(row, shapes)
            report.write()
            report.show(row)


def timed(name: str, make: Callable[[], Call], shapes: Shapes) -> float:
    """Return milliseconds, and say on stderr what runs: a first call may compile for minutes."""
    began = time.perf_counter()
    print(f"{name} ...", end="", file=sys.stderr, flush=True)
    found = median_ms(make(), torch.device(shapes.device), repeats=shapes.rounds)
    print(f" {found:.3f}, after {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return found


def parts(shapes: Shapes, ranks: int) -> dict[str, Callable[[], Call]]:
    """Return what makes the forward and backward of every part, quickest to compile first."""
    edges = tuple(rank * shapes.tokens for rank in range(ranks + 1))
    return {
        "projections ms": lambda: projections(shapes),
        "conv ms": lambda: convolution(shapes),
        "fold ms": lambda: folded(shapes, ranks),
        "attention ms": lambda: attention(shapes, ranks),
        "scan ms": lambda: scan(shapes, Share(0, edges)),
        "scan, wider ms": lambda: scan(shapes, Share(1, edges)),
    }


SAME_FOR_ALL = ("projections ms", "conv ms", "scan ms")
"""Parts that do not depend on the number of ranks."""


def received(shapes: Shapes, ranks: int) -> dict[str, int]:
    """Return the bytes that a rank receives per layer, forward and backward together."""
    element, others = getattr(torch, shapes.dtype).itemsize, ranks - 1
    state = shapes.value_heads * shapes.head_dim**2 * 4
    tail = (shapes.width - 1) * shapes.conv_channels * element
    both = shapes.projected + shapes.value_heads * shapes.head_dim
    zigzag, contiguous = (by_name(name, shapes.tokens * ranks, ranks) for name in ("zigzag", "contiguous"))
    held = [{token for span in contiguous.spans(rank) for token in range(span.lo, span.hi)} for rank in range(ranks)]
    wanted = [{token for span in zigzag.spans(rank) for token in range(span.lo, span.hi)} for rank in range(ranks)]
    moved = max(len(a - b) for a, b in zip(wanted, held, strict=True))
    return {
        "states bytes": 2 * others * state * (2 if ranks > 2 else 1),
        "convolution bytes": 2 * others * tail,
        "to zigzag and back bytes": 2 * 2 * moved * shapes.hidden * element,
        "heads for tokens bytes": 2 * shapes.tokens * both * element * others // ranks,
    }


def summary(row: dict[str, Any], shapes: Shapes) -> dict[str, float]:
    """Return times of the group, and the shares of its local work that distributing it adds."""
    names = ("projections ms", "conv ms", "scan ms")
    local = shapes.layers * sum(row[name] for name in names) + row["attention ms"]
    found = {
        "group, local work ms": local,
        "wider scans, % of it": 100 * shapes.layers * (row["scan, wider ms"] - row["scan ms"]) / local,
        "folds, % of it": 100 * shapes.layers * row["fold ms"] / local,
    }
    if shapes.link_gbs:
        per_ms = shapes.link_gbs * 1e6
        exchange = shapes.layers * (row["states bytes"] + row["convolution bytes"]) / per_ms
        found["exchanges, % of it"] = 100 * exchange / local
        found["to zigzag and back, % of it"] = 100 * row["to zigzag and back bytes"] / per_ms / local
        found["heads for tokens, % of it"] = 100 * shapes.layers * row["heads for tokens bytes"] / per_ms / local
    return found


def normal(shapes: Shapes, *size: int) -> torch.Tensor:
    """Return a leaf (1, tokens, ...)."""
    given = {"device": shapes.device, "dtype": getattr(torch, shapes.dtype)}
    return torch.randn(1, shapes.tokens, *size, **given).requires_grad_()


def both_ways(run: Callable[[], torch.Tensor], leaves: list[torch.Tensor], shapes: Shapes) -> Call:
    """Return a call of the forward and the backward."""
    if not shapes.backward:
        return torch.no_grad()(run)
    dout = torch.randn_like(run())
    return lambda: torch.autograd.grad(run(), leaves, dout)


def projections(shapes: Shapes) -> Call:
    """Into q, k, v, gate, beta and decay, and out of the values."""
    x, y = normal(shapes, shapes.hidden), normal(shapes, shapes.value_heads * shapes.head_dim)
    given = {"device": x.device, "dtype": x.dtype, "requires_grad": True}
    into = torch.randn(shapes.projected, shapes.hidden, **given)
    out = torch.randn(shapes.hidden, y.shape[2], **given)
    one, other = (
        both_ways(lambda: F.linear(x, into), [x, into], shapes),
        both_ways(lambda: F.linear(y, out), [y, out], shapes),
    )
    return lambda: (one(), other())


def convolution(shapes: Shapes) -> Call:
    """A causal convolution of q, k and v by PyTorch, after `width - 1` tokens of another rank."""
    x = normal(shapes, shapes.conv_channels)
    weight = torch.randn(shapes.conv_channels, 1, shapes.width, device=x.device, dtype=x.dtype, requires_grad=True)
    before = x[:, : shapes.width - 1].detach()
    channels = shapes.conv_channels
    return both_ways(lambda: F.conv1d(torch.cat([before, x], 1).mT, weight, groups=channels), [x, weight], shapes)


def scan(shapes: Shapes, share: Share) -> Call:
    """The kernel, and where a state comes in what reads it."""
    keys = [F.normalize(normal(shapes, shapes.key_heads, shapes.head_dim).detach(), dim=-1) for _ in range(2)]
    value = normal(shapes, shapes.value_heads, shapes.head_dim)
    gates = (normal(shapes, shapes.value_heads).detach() for _ in range(2))
    decay, beta = -next(gates).float().abs(), next(gates).sigmoid()
    names = ("q", "k", "v", "g", "beta") if shapes.kernel == "fla" else ("query", "key", "value", "g", "beta")
    tokens = dict(zip(names, (x.detach().requires_grad_() for x in (*keys, value, decay, beta)), strict=True))
    kernel = gated_delta_rule(shapes.kernel)
    state = torch.randn(1, 1, shapes.value_heads, shapes.head_dim, shapes.head_dim, device=value.device)

    def run() -> torch.Tensor:
        local = local_scan(kernel, tokens, share)
        return local.finish(state if share.led else None)[0]

    return both_ways(run, list(tokens.values()), shapes)


def gated_delta_rule(name: str) -> Scan:
    """Return flash-linear-attention's kernel or transformers' chunked function."""
    if name == "fla":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return fla_scan(chunk_gated_delta_rule)
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return fla_scan(torch_chunk_gated_delta_rule, keys="key", values="value", packs=False)


def folded(shapes: Shapes, ranks: int) -> Call:
    """The longest fold forward, the longest one back, and the gradient of M."""
    size = (ranks, 1, shapes.value_heads, shapes.head_dim, shapes.head_dim)
    ms, states = (list(torch.randn(size, device=shapes.device) / shapes.head_dim) for _ in range(2))
    carries = dict(enumerate(zip(ms, states, strict=True)))
    maps, source, last = dict(enumerate(ms)), list(range(-1, ranks)), ranks - 2

    def call() -> object:
        with torch.no_grad():
            incoming = fold(carries, source, [last], matrix=True)[last]
            if not shapes.backward:
                return incoming
            outgoing = fold_back(maps, {ranks - 1: states[0]}, source, [1], matrix=True)[1]
            return gradient_of_m(outgoing, incoming, ms[0], matrix=True)

    return call


def attention(shapes: Shapes, ranks: int) -> Call:
    """The busiest rank's program; numbers of other ranks are noise."""
    where = {"device": shapes.device, "dtype": getattr(torch, shapes.dtype)}
    given = draw(shapes.tokens, *shapes.attention, **where)
    return both_phases(prepare(given, ranks, ranks - 1, shapes.attention_kernel), given, backward=shapes.backward)


if __name__ == "__main__":
    main()
