"""One query row over keys that are spread over ranks is dense attention over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import DistAttentionConfig, decode_attn_func
from dfa_megatron.doctor.dense import dense_attention
from dfa_megatron.errors import DisagreementError, DistAttentionError, UnsupportedError
from tests.support.close import assert_close
from tests.support.workers import over_ranks

CASES = {  # keys of each rank, heads, kv_heads, head_dim_v, options
    "uneven": ((5, 0, 9), 4, 2, 8, {}),
    "cap and sinks": ((3, 4, 4), 4, 1, 8, {"softcap": 2.0, "kernel": "reference"}),
    "other values, first keys hidden": ((6, 1, 2), 2, 2, 4, {"kernel": "reference", "hidden": 6}),
    "no keys": ((0, 0, 0), 2, 1, 8, {}),
    "long, in parts": ((4101, 2, 0), 2, 2, 8, {"kernel": "reference"}),
}


def whole(rank: int, world_size: int, name: str) -> None:
    shares, heads, kv_heads, width, given = CASES[name]
    options = dict(given)
    config = DistAttentionConfig(kernel=options.pop("kernel", "auto"))
    softcap, hidden = options.pop("softcap", 0.0), options.pop("hidden", 0)
    torch.manual_seed(3)
    q = torch.randn(2, 1, heads, 8, dtype=torch.float64)
    k = torch.randn(2, sum(shares), kv_heads, 8, dtype=torch.float64)
    v = torch.randn(2, sum(shares), kv_heads, width, dtype=torch.float64)
    sinks = torch.randn(heads, dtype=torch.float64) if softcap else None
    own = [x.split(shares, 1)[rank] for x in (k, v)]
    starts = (0, min(hidden, shares[rank]) if rank == 0 else 0) if hidden else None
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        more = None if sinks is None else sinks.to(dtype)
        with torch.autocast("cpu", enabled=dtype == torch.float32):  # rounds nothing
            found = decode_attn_func(
                q.to(dtype), *(x.to(dtype) for x in own), starts=starts, softcap=softcap, sinks=more, config=config
            )
        rows = [
            dense_attention(q[at : at + 1], k[at : at + 1, lo:], v[at : at + 1, lo:], softcap=softcap, sinks=sinks)[0]
            for at, lo in ((0, 0), (1, hidden))
        ]
        assert_close(found, torch.cat(rows), tolerance=tolerance, name=f"{name} {dtype}")


@over_ranks(3)
def test_partials_over_any_share_of_the_keys_merge_to_the_whole(rank: int, world_size: int) -> None:
    for name in CASES:
        whole(rank, world_size, name)
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 3 + rank, 2, 8)
    for verify in ("on", "off"):
        decode_attn_func(q, k, k, config=DistAttentionConfig(verify=verify))
    with pytest.raises(DistAttentionError):  # of one rank alone
        decode_attn_func(q, k, k[:, :, :1] if rank == 1 else k)


@over_ranks(2)
def test_ranks_that_ask_for_different_things_are_told(rank: int, world_size: int) -> None:
    q, k, config = torch.randn(1, 1, 2, 8), torch.randn(1, 3, 2, 8), DistAttentionConfig(kernel="reference")
    others: list[dict[str, Any]] = [{"softmax_scale": 0.5}, {"softcap": 2.0}, {"sinks": torch.zeros(2)}]
    others += [{"v_cache": k[..., :4]}, {"k_cache": k[:, :, :1], "v_cache": k[:, :, :1]}]
    for other in others:
        given = {"k_cache": k, "v_cache": k} | (other if rank else {})
        with pytest.raises(DisagreementError, match="run different"):
            decode_attn_func(q, **given, config=config, group=dist.new_group([0, 1]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"q": torch.randn(1, 2, 2, 8)}, "one query row"),
        ({"v_cache": torch.randn(1, 3, 1, 8)}, "one query row"),
        ({"k_cache": torch.randn(1, 3, 2, 4)}, "one batch, head_dim"),
        ({"q": torch.randn(1, 1, 2, 8, dtype=torch.float64)}, "one batch, head_dim"),
        ({"starts": (4,)}, "a number from 0 to 3"),
        ({"q": torch.randn(1, 1, 2, 8, requires_grad=True)}, "no backward"),
        ({"sinks": torch.randn(3)}, "one number for each"),
        ({"q": torch.randn(1, 1, 3, 8)}, "multiple of kv_heads"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, object], why: str) -> None:
    given = {"q": torch.randn(1, 1, 2, 8), "k_cache": torch.randn(1, 3, 2, 8), "v_cache": torch.randn(1, 3, 2, 8)}
    with pytest.raises(UnsupportedError, match=why):
        decode_attn_func(**given | change)  # type: ignore[arg-type]


@pytest.mark.gpu(2)
@over_ranks(2, cuda=True, timeout=170)
def test_two_gpus_merge_partials_of_long_caches(rank: int, world_size: int) -> None:
    for kernel, kv_heads, width in (("auto", 2, 64), ("auto", 8, 32), ("triton", 2, 64)):
        torch.manual_seed(3)
        given = (
            torch.randn(2, n, h, d, device="cuda")
            for n, h, d in ((1, 8, 64), (9001, kv_heads, 64), (9001, kv_heads, width))
        )
        q, k, v = (x.bfloat16() for x in given)
        own = [x.tensor_split([8500], 1)[rank] for x in (k, v)]
        config = DistAttentionConfig(kernel=kernel)
        starts = (7, 0) if rank == 0 else None
        for _ in range(3):
            found = decode_attn_func(q, *own, starts=starts, config=config)
        wide = [x.double() for x in (q, k, v)]
        rows = [
            dense_attention(*(x[at : at + 1, lo if x is not wide[0] else 0 :] for x in wide))[0]
            for at, lo in ((0, 7), (1, 0))
        ]
        assert_close(found, torch.cat(rows), tolerance=2e-2, name=f"{kernel}, {kv_heads} kv_heads, {width}")
