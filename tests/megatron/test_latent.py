"""Multi-latent attention, which makes its rotary table inside its layers: its tables, and tensor parallelism."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.cpu.stand_in import use_cpu
from dfa_megatron.megatron.layers.rotary import OrderedRotary, order_rotary
from dfa_megatron.megatron.tokens.exchange import Relayout
from dfa_megatron.megatron.tokens.packed_documents import Pack
from dfa_megatron.megatron.tokens.visit import Visit, running
from tests.megatron import harness
from tests.megatron.harness import Case, Topology, case
from tests.megatron.kinds import LATENT
from tests.support.workers import run_ranks

full = functools.partial(case, checkpoint="auto", steps=1)


def sequence_parallel(rank: int, ranks: int) -> None:
    """One rank is no reference of TP: Megatron's own projection of the shared rotary key loses a gradient there."""
    config = (*LATENT, ("calculate_per_token_loss", True))
    alone, shared = Topology(tp=2, dp=2), Topology(tp=2, cp=2)
    harness.start(alone)
    plain = {"steps": 1, "config": (*config, ("sequence_parallel", False))}  # its PyTorch norms refuse it
    wants = [harness.train(alone, Case(None, pairs=pairs, **plain)) for pairs in ("", "documents")]  # type: ignore[arg-type]
    harness.start(shared)  # padded packs first: nobody has declared yet how batches are cut
    packed = functools.partial(full, config=config, pairs="documents")
    packs = [packed("boundary", padded=True), packed("contiguous")]
    for wanted in (*packs, *(full(layout, config=config) for layout in ("zigzag", "boundary"))):
        found, want = harness.train(shared, wanted), wants[wanted.pairs == "documents"]
        assert found.losses == pytest.approx(want.losses, abs=1e-5)
        for name, gradient in want.gradients.items():
            # Megatron sums this one over TP ranks, each of which has the whole without sequence parallelism.
            expected_gradient = gradient / (2 if "q_layernorm" in name else 1)
            error = (found.gradients[name] - expected_gradient).abs().max()
            assert error <= 1e-5 * gradient.abs().max(), f"{wanted}: {name}"


@pytest.mark.support("megatron", "latent attention, PP 2 x CP 2 and TP 2 x CP 2")
def test_tensor_and_sequence_parallelism_train_like_megatron() -> None:
    run_ranks(4, sequence_parallel)


def _check_tables(rank: int, ranks: int) -> None:
    use_cpu()
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    made = [
        YarnRotaryEmbedding(
            8, scaling_factor=4.0, original_max_position_embeddings=16, use_cpu_initialization=True, cp_group=group
        )
        for group in (dist.new_group([0, 1]), dist.new_group([rank], use_local_synchronization=True))
    ]
    attention, whole = torch.nn.Module(), made[1]
    attention.rotary_pos_emb = made[0]
    order_rotary(attention, "contiguous")
    order_rotary(attention, "contiguous")  # as often as one likes
    for length in (8, 48, 24, 24, 48):  # shorter and longer than what it was built for, and than the last
        table, factor = attention.rotary_pos_emb(length)
        assert factor == whole(length)[1]
        assert torch.equal(table, whole(length)[0].chunk(ranks)[rank]), length
        expected_table = whole(length)[0].chunk(ranks)[rank]
        for part, expected_part in zip(
            attention.rotary_pos_emb.get_cached_cos_sin(length, dtype=torch.float64),
            ((expected_table.cos() * factor).double(), (expected_table.sin() * factor).double()),
            strict=True,
        ):
            assert torch.equal(part, expected_part), length


def test_an_attention_that_makes_its_table_in_another_way_is_refused() -> None:
    attention = torch.nn.Module()
    attention.rotary_pos_emb = torch.nn.Identity()
    with pytest.raises(UnsupportedError, match="order of tokens can be chosen"):
        order_rotary(attention, "zigzag")


class Counting(OrderedRotary):
    """A table of token numbers."""

    def get_emb(self, length: int, offset: int) -> torch.Tensor:
        return torch.arange(offset, offset + length)

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD


def _rows_of_lengths_and_offsets(rank: int, ranks: int) -> list[list[int]]:
    _check_tables(rank, ranks)
    rotary = Counting()
    rows = [rotary.forward(length, offset).tolist() for length, offset in ((4, 0), (4, 6), (4, 6), (8, 6))]
    group = dist.group.WORLD
    assert group is not None
    with running(Visit(None, group, "contiguous", "contiguous", Pack((0, 3, 8)), (1, 4), Relayout(group))):
        return [*rows, rotary.forward(8, 6).tolist()]


def test_a_rotary_table_is_of_this_ranks_tokens_and_known_by_its_length_its_offset_and_its_documents() -> None:
    assert run_ranks(2, _rows_of_lengths_and_offsets) == [
        [[0, 1], [6, 7], [6, 7], [6, 7, 8, 9], [6, 7, 8, 6]],
        [[2, 3], [8, 9], [8, 9], [10, 11, 12, 13], [7, 8, 9, 10]],
    ]
