"""Every method that runs on a CPU against the check; ablations, right without overlap and wrong without messages."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from benchmarks.attention import correctness as check
from benchmarks.attention.ablation import ablation
from benchmarks.attention.baselines import baseline_methods, transformer_engine
from benchmarks.attention.job import Job, Problem
from benchmarks.attention.method import contiguous, our_methods, zigzag
from dfa_megatron.doctor.world import World, join
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.sharding import shard_sequence
from tests.support.attend import case
from tests.support.close import assert_close
from tests.support.workers import over_ranks

JOB = Job(seq_length=(64,), heads=(4,), head_dim=16, dtype="bfloat16", kernel=("cpu",))


@over_ranks(3)
def test_a_rank_gets_the_tokens_that_the_layouts_say(rank: int, ranks: int) -> None:
    x, world = torch.arange(48.0).view(1, 48, 1, 1), join("cpu")
    assert torch.equal(contiguous(x, world), shard_sequence(x, layout="contiguous"))
    assert torch.equal(zigzag(x, world), shard_sequence(x, layout="zigzag"))
    assert torch.equal(zigzag(x, world, together=ranks), contiguous(x, world))


def _check(rank: int, ranks: int, baseline: str, mask: str, heads: int, kv_heads: int, dtype: str) -> dict[str, str]:
    """By method: "" if it is exact, else what is wrong, or why it does not serve the problem."""
    problem = Problem(heads, kv_heads, 16, mask, dtype)
    world = join("cpu")
    exact = check.truth(problem, world)
    methods, _ = baseline_methods(replace(JOB, baselines=(baseline,)))
    found = {}
    for method in methods:
        try:
            shares = check.squares(method, exact, world)
        except UnsupportedError as error:
            found[method.name] = f"refused: {error}"
            continue
        dist.all_reduce(shares)
        found[method.name] = check.verdict(shares.tolist(), dtype)[1]
    return found


@over_ranks(4)
def test_ulysses_is_exact_and_copies_key_value_heads_that_are_too_few(rank: int, ranks: int) -> None:
    for mask in ("causal", "full"):
        for heads, kv_heads in ((4, 4), (8, 2), (4, 1)):
            found = _check(rank, ranks, "ulysses", mask, heads, kv_heads, "float64")
            assert found == {"ulysses cpu": ""}, (mask, heads, kv_heads)


@over_ranks(1, 2, 3)
def test_ring_self_attention_is_exact(rank: int, ranks: int) -> None:
    for mask in ("causal", "full"):
        found = _check(rank, ranks, "ring_self_attention", mask, 4, 4, "float64")
        assert found == {"ring_self_attention": ""}, mask


@over_ranks(2)
def test_ulysses_refuses_heads_that_do_not_divide(rank: int, ranks: int) -> None:
    (found,) = _check(rank, ranks, "ulysses", "causal", 33, 33, "float32").values()
    assert "33 heads and 33 kv_heads: it divides both" in found


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@over_ranks(2, timeout=120)
def test_deepspeeds_attention_is_exact_around_a_kernel_of_ours(rank: int, ranks: int) -> None:
    assert _check(rank, ranks, "deepspeed", "causal", 4, 2, "float32") == {"deepspeed ulysses cpu": ""}


@pytest.mark.skipif(importlib.util.find_spec("ringmaster") is None, reason="axolotl-ringmaster is not installed")
@over_ranks(2, 3)
def test_ringmaster_is_exact_around_a_kernel_of_ours(rank: int, ranks: int) -> None:
    assert _check(rank, ranks, "ringmaster", "causal", 4, 2, "float32") == {"ringmaster cpu": ""}
    (found,) = _check(rank, ranks, "ringmaster", "full", 4, 2, "float32").values()
    assert "its schedule is causal" in found


def test_a_baseline_that_is_named_and_does_not_run_here_is_refused_and_otherwise_left_out() -> None:
    with pytest.raises(UnsupportedError, match="CUDA"):
        baseline_methods(replace(JOB, baselines=("pytorch",)))
    methods, absent = baseline_methods(replace(JOB, baselines=("installed",)))
    assert "ulysses cpu" in [method.name for method in methods]
    assert any("CUDA" in why for why in absent)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "ranks"), [("a2a", 33, 33, 2), ("a2a", 8, 2, 4), ("a2a+p2p", 33, 33, 4)]
)
def test_transformer_engine_is_not_asked_to_divide_what_it_cannot(
    kind: str, heads: int, kv_heads: int, ranks: int
) -> None:
    alone = World(0, ranks, torch.device("cpu"), None)  # type: ignore[arg-type]
    method = transformer_engine._communicating(kind)
    with ExitStack() as stack, pytest.raises(UnsupportedError, match="divides both among"):
        method.start(Problem(heads, kv_heads, 64, "causal", "bfloat16"), 64, alone, stack)


def test_names_tell_our_variants_apart() -> None:
    job = replace(
        JOB, schedule=("ring", "zigzag"), transport=("auto", "p2p"), ulysses_degree=("auto", "2"),
        ablation=("none", "no_overlap"),
    )  # fmt: skip
    names = [method.name for method in our_methods(job)]
    assert len(set(names)) == len(names) == 16
    assert "dfa zigzag cpu p2p ulysses2 no_overlap" in names
    with ExitStack() as stack:
        assert our_methods(JOB)[0].start(Problem(4, 4, 16, "causal", "float32"), 8, world=None, stack=stack)  # type: ignore[arg-type]


@over_ranks(3)
def test_without_overlap_results_are_right_and_without_communication_they_are_not(rank: int, ranks: int) -> None:
    whole = case(ranks * 8)
    shard, want = [x[:, rank * 8 : rank * 8 + 8] for x in whole.inputs], whole.out[:, rank * 8 : rank * 8 + 8]
    for name in ("no_overlap", "no_communication", ""):
        with ablation(name) if name else nullcontext():
            out = dfa_megatron.dist_flash_attn_func(*shard, causal=True)
        if name == "no_communication":
            assert rank == 0 or not torch.allclose(out, want)
        else:
            assert_close(out, want, tolerance=1e-12)
