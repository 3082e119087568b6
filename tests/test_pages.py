"""The pages: their links lead somewhere, and their code runs where it can.

The bytes on the page of hybrids are what the benchmark counts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.recurrence import Shapes, received
from dfa_megatron import masks
from tests.support import house, pages

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_code_of_the_pages_fits_their_width() -> None:
    long = []
    for page in (ROOT / "docs").glob("*.md"):
        blocks = re.findall(r"^```(?:python|sh|json)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        long += [(page.name, line) for block in blocks for line in block.splitlines() if len(line) > 88]
    assert long == []


@pytest.mark.parametrize("block", pages.ALONE)
def test_the_code_of_a_page_runs(block: pages.Block) -> None:
    packed = "varlen" in block[1]
    shape = (16384, 1, 8) if packed else (1, 64, 4, 32)
    names: dict[str, Any] = {"group": None, "tokens": torch.arange(16384), "labels": torch.arange(16384)}
    names |= {x: torch.randn(shape) for x in "qkv"}
    names |= {"index_q": names["q"], "index_k": torch.randn(1, 64, 32), "weights": torch.randn(1, 64, 4)}
    if block[1] == "q_ranges":
        names |= {"q_ranges": [(0, 9), (9, 20), (20, 30), (30, 40)], "k_ranges": [(0, 9), (0, 20), (12, 30), (26, 40)]}
        names |= {"types": ["full", "causal", "inv_causal", "bi_causal"], "length": 40}
    found = pages.run(block, names)
    if block[1] == "q_ranges":  # corners: causal at the bottom right, inverse causal at the top left
        i, j = torch.arange(40)[:, None], torch.arange(40)
        both, inverse = (j >= i - 4) & (j <= i), (j >= i - 8) & (j >= 12) & (j < 30)
        seen = torch.where(i < 9, j < 9, torch.where(i < 20, j <= i, torch.where(i < 30, inverse, both)))
        assert found["mask"].tiles == masks.from_dense(seen).tiles
    if "out" in found:
        assert found["out"].shape == shape
    if packed:
        assert found["positions"][[699, 700, 701, 9000]].tolist() == [699, 0, 0, 0]


def test_the_readme_names_the_commands_of_the_makefile_and_the_gate_runs_the_second() -> None:
    (first,) = re.findall(
        r"^```sh\n((?:make .*\n)+)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make train", "make test"]
    assert "make test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8").split("step ")[-1]


def test_every_file_of_the_walk_from_a_call_to_a_kernel_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = text.split("## From a call to a kernel")[1].split("**Who owns what.**")[0]
    names = set(re.findall(r"\b((?:runtime|plan|kernels)/[\w/]*\w+\.py)", walk)) | {"attention.py"}
    assert len(names) >= 10
    assert [name for name in names if not (ROOT / "dfa_megatron" / name).is_file()] == []


def test_every_block_of_code_runs_or_is_listed_with_the_reason() -> None:
    listed = [*pages.ALONE, *pages.WITH_TRANSFORMERS, *pages.NOT_RUN]
    there = [(page, code) for page in pages.PAGES for code in pages.blocks_of(page)]
    found = [(pages.ROOT / block[0], pages.find(block)) for block in listed]
    assert [code for code in there if code not in found] == []
    assert len(found) == len({*found}) == len(there)


def test_the_page_says_what_a_tree_saves() -> None:
    prompt, answer, answers = 8192, 1024, 8
    tree = masks.prompt_tree([prompt, *[answer] * answers], [-1, *[0] * answers])
    repeated = masks.documents([prompt + answer] * answers)
    one, other = (f"{mask.length:,} tokens and {mask.area / 1e6:.0f} million pairs" for mask in (tree, repeated))
    text = " ".join((ROOT / "docs/trees.md").read_text(encoding="utf-8").split())
    assert f"takes {one}; with repeated prompts it takes {other.replace(' tokens', '').replace(' pairs', '')}" in text


MIB = 2**20


def chain_bytes(shapes: Shapes, ranks: int, parts: int) -> int:
    """Return the bytes of a chain of maps, as flash-linear-attention 0.6 and Attention Gym (for torchtitan) gather it.

    Forward and backward, each rank gathers one float32 (key, value + key) per head and part, and `width - 1` tokens.

    Args:
        parts: of a rank's tokens that are apart from each other: 1 for contiguous tokens, 2 for zigzag.
    """
    maps = shapes.value_heads * shapes.head_dim * 2 * shapes.head_dim * 4
    tails = (shapes.width - 1) * shapes.conv_channels * getattr(torch, shapes.dtype).itemsize
    return 2 * (ranks - 1) * parts * (maps + tails)


def test_the_table_of_peers_has_the_bytes_that_the_benchmark_counts() -> None:
    page = (house.ROOT / "docs" / "hybrids.md").read_text(encoding="utf-8")
    eight, nine = (received(Shapes(), ranks) for ranks in (8, 9))
    assert f"| {(eight['states bytes'] + eight['convolution bytes']) / MIB:.0f} MiB |" in page
    chain, zigzag = (f"{chain_bytes(Shapes(), 8, parts) / MIB:.0f} MiB" for parts in (1, 2))
    assert f"| batches of one | {chain}, zigzag {zigzag} |" in page
    assert f"| one document | {chain} |" in page
    assert f"| {eight['heads for tokens bytes'] / 2**30:.1f} GiB |" in page
    assert f"states, and {eight['to zigzag and back bytes'] / MIB:.0f} MiB per attention layer" in page
    assert f"grows by {(nine['states bytes'] - eight['states bytes']) / MIB:.0f} MiB with each rank" in page
    per_ranks = ((ranks, received(Shapes(), ranks)) for ranks in range(8, 64))
    more = (n for n, x in per_ranks if 3 * (x["states bytes"] + x["convolution bytes"]) > x["to zigzag and back bytes"])
    assert abs(next(more) - 22) <= 1
    assert "From about 22 ranks on" in page
