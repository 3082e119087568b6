"""Bands: the tiles of a call hold exactly its pairs, and every kernel that takes bands takes any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfa_megatron import kernels
from dfa_megatron.doctor.dense import band_mask
from dfa_megatron.kernels.adapters.aten import cut_tall
from dfa_megatron.kernels.adapters.cpu import cut_rows
from dfa_megatron.kernels.segments import visible
from dfa_megatron.plan.language.geometry import Band, Segment, Tile
from tests.support.close import assert_close
from tests.support.kernel_cases import Case, problem, run

bounds = st.one_of(st.just(-1), st.integers(0, 60))
bands = st.builds(Band, left=bounds, right=bounds)
lengths = st.integers(1, 40)


def tiles_of(cut: Callable[[Tile], Iterable[Tile]], band: Band, q_len: int, kv_len: int) -> list[Tile]:
    """The tiles that a kernel with this cut launches."""
    whole = Segment(0, q_len, 0, kv_len, band).tile.shrink()
    return [] if whole is None else list(cut(whole))


def pairs(tile: Tile, q_len: int, kv_len: int, window: torch.Tensor) -> torch.Tensor:
    """The window of a tile, put at its place in the call."""
    seen = torch.zeros(q_len, kv_len, dtype=torch.int64)
    seen[tile.q.lo : tile.q.hi, tile.kv.lo : tile.kv.hi] = window
    return seen


def window_of(tile: Tile) -> torch.Tensor:
    seen = visible(tile.band, len(tile.q), len(tile.kv), torch.device("cpu"))
    return torch.ones(len(tile.q), len(tile.kv), dtype=torch.bool) if seen is None else seen


def flash_attention_2_window(band: Band, q_len: int, kv_len: int) -> torch.Tensor:
    """The pairs that FlashAttention-2 sees, bounds as flash_api.cpp reads them (mha_fwd, set_params_fprop)."""
    left = -1 if band.left >= kv_len else band.left
    right = -1 if band.right >= kv_len else band.right
    if left < 0 and right < 0:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    left, right = (kv_len if bound < 0 else bound for bound in (left, right))
    distance = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None] - (kv_len - q_len)
    return (distance >= -left) & (distance <= right)


@settings(max_examples=100, deadline=None)
@given(bands, lengths, lengths, st.integers(1, 50))
def test_cut_rows_hold_every_pair_once_and_no_empty_row(band: Band, q_len: int, kv_len: int, rows: int) -> None:
    tiles = tiles_of(lambda tile: cut_rows(tile, rows), band, q_len, kv_len)
    held = sum((pairs(tile, q_len, kv_len, window_of(tile)) for tile in tiles), torch.zeros(q_len, kv_len))
    assert torch.equal(held.bool(), band_mask(q_len, kv_len, band))
    assert held.max() <= 1
    assert all(len(tile.q) <= rows and window_of(tile).any(1).all() for tile in tiles)


@settings(max_examples=200, deadline=None)
@given(bands, lengths, lengths)
def test_flash_attention_2_reads_the_cut_bands_as_they_are_meant(band: Band, q_len: int, kv_len: int) -> None:
    tiles = tiles_of(cut_tall, band, q_len, kv_len)
    held = torch.zeros(q_len, kv_len, dtype=torch.int64)
    for tile in tiles:
        held += pairs(tile, q_len, kv_len, flash_attention_2_window(tile.band, len(tile.q), len(tile.kv)))
        assert window_of(tile).any(1).all()
    assert torch.equal(held, band_mask(q_len, kv_len, band).long())
    assert len(tiles) <= 3


def test_an_uncut_tall_band_would_be_misread() -> None:
    """Why `cut_tall` exists: a right bound of kv_len or more is dropped although it hides pairs."""
    band, q_len, kv_len = Band(-1, 8), 10, 2
    right = band_mask(q_len, kv_len, band)
    assert not torch.equal(flash_attention_2_window(band, q_len, kv_len), right)


@pytest.mark.parametrize("name", ["reference", "cpu"])
@settings(max_examples=60, deadline=None)
@given(bands, lengths, lengths, st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), st.integers(1, 2))
def test_any_band_is_exact_in_float64(
    name: str, band: Band, q_len: int, kv_len: int, heads: tuple[int, int], batch: int
) -> None:
    p = problem(Case(q_len, kv_len, band, *heads, head_dim=8, batch=batch), torch.float64, "cpu")
    out, lse, *gradients = run(kernels.get(name), p.call, p.dout)
    assert_close(out, p.want[0], tolerance=1e-12, name="out")
    assert_close(lse, p.lse, tolerance=1e-12, name="lse")
    for label, g, w in zip(("dq", "dk", "dv"), gradients, p.want[2:], strict=True):
        error = (g - w).norm() / max(w.norm(), p.dout.norm())  # a row with one key has dq 0 but for rounding
        assert error <= 1e-13, f"{label} is off by {error}"
