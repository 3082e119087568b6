"""Which transport "auto" comes to: not the one that keeps its memory, where messages need too much of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime import prepare
from dfa_megatron.runtime.comm import copy_engine, symmetric_memory
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.comm.transport import Transport
from dfa_megatron.runtime.comm.transports import Transports
from tests.support.attend import case
from tests.support.workers import over_ranks


@over_ranks(3)
def test_auto_leaves_the_copy_engines_where_their_memory_would_be_too_large(rank: int, ranks: int) -> None:
    """The kinds that a forward and backward ask their channel for, by the largest arena that is allowed."""
    asked: set[str] = set()
    real = Transports.reserve

    def noted(self: Transports, device: torch.device, kind: str, nbytes: int) -> Transport:
        asked.add(kind)
        return real(self, device, "p2p", nbytes)

    Transports.reserve = noted  # type: ignore[method-assign]  # the process ends with this function
    whole, found = case(ranks * 8), []
    for transport, spare in (("auto", 0), ("auto", -1), ("copy_engine", -1), ("p2p", 0)):
        shard, _ = whole.shard(rank, ranks)
        config = DistAttentionConfig(schedule="balanced_shared", transport=transport)
        dfa_megatron.dist_flash_attn_func(*shard, causal=True, config=config).sum().backward()
        prepare.LARGEST_ARENA = prepare.in_use()[-1].arena_bytes + spare
        asked.clear()
        scale = 0.1 + len(found)  # another request
        out = dfa_megatron.dist_flash_attn_func(*shard, causal=True, softmax_scale=scale, config=config)
        out.sum().backward()
        found.append(set(asked))
    assert found == [{"auto"}, {"p2p"}, {"copy_engine"}, {"p2p"}]


@pytest.mark.gpu(2)
@over_ranks(2, cuda=True)
def test_large_messages_between_gpus_take_no_symmetric_memory(rank: int, ranks: int) -> None:
    whole = case(ranks * 256, dtype=torch.bfloat16, device="cuda", heads=4, kv_heads=2, head_dim=64)
    rows, (shard, _) = whole.rows(rank, ranks), whole.shard(rank, ranks)
    prepare.LARGEST_ARENA = 0
    config = DistAttentionConfig(ulysses_degree=1)  # with exchanged heads there may be no arena at all
    out = dfa_megatron.dist_flash_attn_func(*shard, causal=True, config=config)
    used = prepare.in_use()[-1]
    assert used.transport == "p2p"
    torch.testing.assert_close(out.double(), whole.out[:, rows].double(), atol=2e-2, rtol=2e-2)


@over_ranks(3)
def test_where_one_gpu_has_no_memory_for_messages_all_ranks_hear_of_it_and_auto_goes_on(rank: int, ranks: int) -> None:
    """Errors of two arenas for which the last rank has no memory, what is left, and what "auto" is then."""
    device, errors = torch.device("cpu"), []
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)  # the process ends with this function
    engine = object.__new__(copy_engine.CopyEngineTransport)
    over = channel_of(None)
    engine.over, engine.device = over, device
    engine._arena, engine._addresses = torch.empty(64, dtype=torch.uint8), [1] * ranks

    def zeros(nbytes: int, device: torch.device) -> torch.Tensor:
        if rank == ranks - 1:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.zeros(nbytes, dtype=torch.uint8)

    symmetric_memory._zeros = zeros
    over.transports._open["cpu", "copy_engine"] = over.transports._open["cpu", "auto"] = engine
    for kind in ("copy_engine", "auto"):
        try:
            over.transports.reserve(device, kind, 1 << 21)
        except UnsupportedError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "rank 2 found no memory, 0.0 GiB for what other ranks write: CUDA driver error" in errors[0]
    assert "What works: transport='p2p'" in errors[0]
    assert engine._arena.numel() + len(engine._addresses) == 0
    assert type(over.transports.get(device, "auto")).__name__ == "GlooTransport"


def test_pytorchs_cache_is_emptied_only_where_the_driver_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied, full = [], [False, True]

    def empty(nbytes: int, **options: Any) -> torch.Tensor:
        if full.pop():
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.full((nbytes,), 7, **options)

    monkeypatch.setattr("torch.distributed._symmetric_memory.empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    assert torch.equal(symmetric_memory._zeros(8, torch.device("cpu")), torch.zeros(8, dtype=torch.uint8))
    assert (emptied, full) == ([True], [])
    full.append(False)
    symmetric_memory._zeros(8, torch.device("cpu"))
    assert emptied == [True]
