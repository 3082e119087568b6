"""Packs for benchmarks: lengths as a histogram says, whole, and none above a quarter of the pack."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.documents import draw_documents, histogram, log_normal


def test_lengths_of_a_histogram_lie_in_its_ranges_by_their_shares(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"[100,110)": 3, "[1000,1010)": 1}))
    offsets = draw_documents(1_000_000, 2, 0, histogram(file))
    lengths = [hi - lo for lo, hi in pairwise(offsets)][:-1]
    short = sum(100 <= length < 110 for length in lengths)
    assert short + sum(1000 <= length < 1010 for length in lengths) == len(lengths)
    assert 0.7 < short / len(lengths) < 0.8


def test_a_key_that_is_no_range_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"100-110": 1.0}))
    with pytest.raises(ValueError, match=r"'100-110' is no range of tokens"):
        histogram(file)


def test_documents_fill_the_pack_in_multiples_of_at_most_a_quarter() -> None:
    offsets = draw_documents(4096, 8, 0, log_normal(7.0, 1.2))
    assert (offsets[0], offsets[-1]) == (0, 4096)
    assert all(0 < hi - lo <= 1024 and (hi - lo) % 8 == 0 for lo, hi in pairwise(offsets))
