"""What no result shows: bounds and switches that a fault may drop while every number stays right."""

from __future__ import annotations

import contextlib
import io
import random
from typing import Any

import pytest
import torch

import dfa_megatron
from dfa_megatron import dist_flash_attn_func, dist_flash_attn_varlen_func, kernels, layouts, stats
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.names import LAYOUTS
from dfa_megatron.runtime import prepare
from dfa_megatron.sharding import layout_of_tokens
from tests.support.arguments import arguments
from tests.support.workers import over_ranks


def test_a_process_keeps_a_bounded_number_of_prepared_attentions() -> None:
    q = torch.randn(1, 4, 1, 8)
    for call in range(prepare._KEPT + 6):
        dfa_megatron.dist_flash_attn_func(q, q, q, causal=True, softmax_scale=1.0 + call)
        if call > 3:  # used again and again, so that it stays
            dfa_megatron.dist_flash_attn_func(q, q, q, causal=True, softmax_scale=1.0 + 3)
    kept = [prepared.request.softmax_scale for prepared in prepare._ALONE.values()]
    assert len(kept) == prepare._KEPT
    assert set(kept) == {4.0, *(1.0 + call for call in range(7, prepare._KEPT + 6))}


@over_ranks(2, timeout=60)
def test_the_kernel_hears_that_gradients_are_to_be_deterministic(rank: int, ranks: int) -> None:
    """By the way of asking: the values that a kernel was chosen for, and those that its backward was given."""
    chosen, given = set[bool](), set[bool]()
    kernel: Any = type(kernels.get("reference"))
    refusal, backward = kernel.refusal, kernel.backward

    def refused(self: object, need: Any) -> str | None:
        chosen.add(need.deterministic)
        return refusal(self, need)  # type: ignore[no-any-return]

    def computed(self: object, call: Any, *results: Any) -> Any:
        given.add(call.deterministic)
        return backward(self, call, *results)

    def told(attend: Any, local: int, *documents: Any, **options: Any) -> tuple[set[bool], set[bool]]:
        chosen.clear(), given.clear()
        shape = (local, 4, 8) if documents else (1, local, 4, 8)
        q = torch.randn(shape, requires_grad=True)
        attend(q, q, q, *documents, **options).sum().backward()
        return set(chosen), set(given)

    def plain(*qkv: torch.Tensor, **options: Any) -> Any:
        return dfa_megatron.dist_flash_attn_func(*qkv, **arguments(kernel="reference", **options))

    def packs(*given: Any, **options: Any) -> Any:
        return dfa_megatron.dist_flash_attn_varlen_func(*given, **arguments(kernel="reference", **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "refusal", refused)
        patch.setattr(kernel, "backward", computed)
        assert told(plain, 6) == ({False}, {False}), "not asked"
        module = dfa_megatron.DistFlashAttention(causal=True, config=DistAttentionConfig(kernel="reference"))
        torch.use_deterministic_algorithms(True)
        for found in (
            told(plain, 6),
            told(packs, 6, (0, 5, 6 * ranks)),
            told(module, 10),
            told(plain, 6, ulysses_degree=ranks),
        ):
            assert found == ({True}, {True})
        torch.use_deterministic_algorithms(False)


# Counts since the last call, and one line that says how attention runs.


def call(rows: int, **options: object) -> None:
    q = torch.randn(1, rows, 2, 8, requires_grad=True)
    dist_flash_attn_func(q, q, q, causal=True, config=DistAttentionConfig(**options)).sum().backward()


@over_ranks(2, 3)
def test_stats_count_what_ran_since_the_last_call(rank: int, world_size: int) -> None:
    stats()
    for _ in range(3):
        call(8, schedule="ring", ulysses_degree=1, verify="off")
    found = stats()
    assert found["dfa/forwards"] == found["dfa/backwards"] == 3
    assert (found["dfa/schedule"], found["dfa/kernel"], found["dfa/transport"]) == ("ring", "cpu", "gloo")
    # Keys and values of 8 tokens, 2 heads of 8 float32 go round; gradients come home.
    sent = 2 * 8 * 2 * 8 * 4 * (world_size - 1)
    assert found["dfa/sent_mib"] * 2**20 >= 3 * sent
    assert stats()["dfa/forwards"] == 0


def test_the_line_says_how_a_new_attention_runs_and_stands_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "_SAID", set())
    for rows in (11, 12, 11):
        call(rows)
    assert capfd.readouterr().err.splitlines() == ["dfa: 1 rank, contiguous, cpu"]
    call(13, kernel="reference")
    assert capfd.readouterr().err.splitlines() == ["dfa: 1 rank, contiguous, reference"]
    monkeypatch.setenv(prepare.QUIET, "1")
    call(14, schedule="ring", kernel="aten" if torch.cuda.is_available() else "cpu")
    assert capfd.readouterr().err == ""


@over_ranks(3)
def test_no_line_says_how_long_packs_and_parts_are(rank: int, ranks: int) -> None:
    torch.manual_seed(rank)
    draw = random.Random(ranks)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        for number in range(12):
            length = draw.randint(ranks, 40)
            layout = draw.choice([layouts.contiguous(length, ranks), layouts.zigzag(length, ranks)])
            given = layout if number % 2 else "load_balanced"
            x = torch.randn(layout_of_tokens(given, length, ranks, (0, length)).tokens(rank), 2, 8)
            dist_flash_attn_varlen_func(x, x, x, (0, length), causal=True, layout=given)
    lines = said.getvalue().splitlines()
    assert {line.split(", ")[1] for line in lines} <= {"chunks", *LAYOUTS}
    assert len(lines) <= (0 if rank else 8), "each layout, with a schedule or two"
