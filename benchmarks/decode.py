"""Milliseconds of one token in one attention layer over a cache: ranks that share it, beside one GPU's own decoding.

    torchrun --nproc-per-node 2 -m benchmarks.decode --out decode.json
    python -m benchmarks.decode --device cpu --tokens 48 --heads 4 --kv-heads 2 --head-dim 16 --repeats 2

Under torchrun with more ranks than GPUs, ranks share them. Each way is first compared with float64 attention of the
whole cache. `aten` is FlashAttention-2 as built into PyTorch, `flash4` flash-attn-4: both over the whole cache on
each rank's GPU at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bench import Report, flags_of, leave, median_ms, ranks_or_one, relative
from benchmarks.surroundings import share_gpus
from dfa_megatron import DistAttentionConfig, decode_attn_func
from dfa_megatron.flags import flag

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""The largest error relative to float64."""


@dataclass(frozen=True)
class Shapes:
    """What is timed."""

    device: str = flag("auto", "where", choices=("auto", "cuda", "cpu"))
    tokens: tuple[int, ...] = flag((131_072, 1_048_576), "in the cache of all ranks")
    heads: int = flag(32, "of queries")
    kv_heads: int = flag(8, "of keys and values")
    head_dim: int = flag(128, "of all")
    kernels: tuple[str, ...] = flag(("auto",), "of ours, as in the options")
    layers: int = flag(16, "in a row, as in a token; the time is that of one")
    repeats: int = flag(20, "rows of layers that are timed")
    out: Path | None = flag(None, "write the rows as JSON, after each")


def truth(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return dense attention in float64, a head at a time: a whole cache in float64 is large."""
    group = q.shape[2] // k.shape[2]
    outs = []
    for head in range(q.shape[2]):
        keys, values = (x[0, :, head // group].double() for x in (k, v))
        outs.append(torch.softmax(keys @ q[0, 0, head].double() * q.shape[3] ** -0.5, 0) @ values)
    return torch.stack(outs)[None, None]


def of_one_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return FlashAttention's own decoding, by name, as far as it is there."""
    if not q.is_cuda:
        return {}
    scale = q.shape[3] ** -0.5
    found: dict[str, Callable[[], torch.Tensor]] = {
        "aten": lambda: torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, 1, k.shape[1], 0.0, False, False, scale=scale
        )[0]
    }
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return found
    return found | {"flash4": lambda: flash_attn_func(q, k, v, softmax_scale=scale)[0]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one row for each length and way."""
    shapes = flags_of(Shapes, __doc__, argv)
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        share_gpus(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    world = ranks_or_one(shapes.device)
    device = world.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = Report(shapes.out, shapes)
    for tokens in shapes.tokens:
        torch.manual_seed(0)  # the same on every rank
        q = torch.randn(1, 1, shapes.heads, shapes.head_dim, device=device, dtype=dtype)
        k, v = (torch.randn(1, tokens, shapes.kv_heads, shapes.head_dim, device=device, dtype=dtype) for _ in range(2))
        want = truth(q, k, v)
        own = [x.tensor_split(world.size, 1)[world.rank].clone() for x in (k, v)]
        ways = of_one_gpu(q, k, v)
        for kernel in shapes.kernels:
            config = DistAttentionConfig(kernel=kernel)

            def ours(config: DistAttentionConfig = config, own: list[torch.Tensor] = own) -> torch.Tensor:
                found = decode_attn_func(q, *own, config=config)  # noqa: B023 (called in this turn)
                assert isinstance(found, torch.Tensor)
                return found

            ways[f"ours, {kernel}"] = ours
        for name, call in ways.items():
            error = relative(call(), want)
            assert error < LIMITS[dtype], f"{name} is wrong: {error:.1e}"
            ms = median_ms(lambda call=call: [call() for _ in range(shapes.layers)], device, repeats=shapes.repeats)  # type: ignore[misc]
            report.add({"tokens": tokens, "ranks": world.size, "way": name, "ms": ms / shapes.layers, "error": error})
    leave()


if __name__ == "__main__":
    main()
