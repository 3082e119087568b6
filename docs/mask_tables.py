"""The tables of masks and prompt trees."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from docs.raw_results import K, Lines, matching, row, table

NAME, BEFORE, LONG = "11-27-{}xh100-masks", "11-26-{}xh100-masks", "11-27-{}xh100-trees-128k"
LATER = "11-27-{}xh100-masks-later"
LAYERS = "11-26-{}xh100-tree-layers"
OTHERS = (
    *("causal", "full", "causal window", "full window", "causal documents", "full documents", "prefix LM"),
    *("prefix LM documents", "causal blockwise", "block causal documents", "global window"),
)


def cell(name: str, mask: str, thousands: int, kind: str = "") -> str:
    """Return TFLOP/s of a GPU, or "not run"."""
    found = matching(name, {"mask": mask, "tokens": thousands * K})
    return f"{found[0][f'{kind}TFLOP/s']:.0f}" if found else "not run"


CAUSAL = {"causal": "causal"}
TREES = {f"{n} rollouts, prompt {share}": f"tree {n} {share}" for n in (8, 64) for share in (0.3, 0.6, 0.9)}
BLOCKS = {"every other 256 tokens are an image": "images", "blocks of 256 tokens": "blocks"}


def one_and_two(name: str, masks: Mapping[str, str], thousands: int = 32, run: str = "") -> Lines:
    """Return masks, by their labels, on one GPU and on two."""
    lines = [[label, *(cell(name.format(gpus), mask, thousands) for gpus in (1, 2))] for label, mask in masks.items()]
    return table([f"TFLOP/s of a GPU, {thousands}K tokens{run}", "1 GPU", "2 GPUs"], lines)


def trees_before() -> Lines:
    """Return trees beside FlexAttention, on four GPUs and longer, a day before."""
    lines = []
    for label, mask in (CAUSAL | TREES).items():
        flex = cell(BEFORE.format(1), mask, 32, "flex ") if mask != "causal" else ""
        four = [cell(BEFORE.format(4), mask, tokens) for tokens in (32, 128)]
        lines.append([label, cell(BEFORE.format(1), mask, 32), flex, *four])
    head = ["32K, 1 GPU", "FlexAttention, 1 GPU", "4 GPUs", "128K, 4 GPUs"]
    return table(["TFLOP/s of a GPU", *head], lines)


def tree_layers() -> Lines:
    """Return four layers of Qwen3-4B on rollouts as a tree and as documents."""
    lines = []
    for share in (0.3, 0.6, 0.9):
        for way in ("documents", "tree"):
            found = [row(LAYERS.format(gpus), share=share, **{"packed as": way}) for gpus in (1, 2)]
            cells = [f"{one['ms']:.0f} ms, {one['peak GiB']:.1f} GiB" for one in found]
            lines.append([str(share) if way == "documents" else "", way, f"{found[0]['tokens']:,}", *cells])
    return table(["prompt's share", "packed as", "tokens", "one GPU", "two GPUs"], lines)


PAGES = {
    "docs/trees.md": {
        "trees": partial(one_and_two, NAME, CAUSAL | TREES),
        "trees-long": partial(one_and_two, LONG, TREES, 128),
        "trees-before": trees_before,
        "tree-layers": tree_layers,
    },
    "docs/masks.md": {
        "masks-measured": partial(one_and_two, NAME, dict(zip(OTHERS, OTHERS, strict=True))),
        "masks-blocks": partial(one_and_two, LATER, CAUSAL | BLOCKS, run=", a later run"),
    },
}
