"""The marker `support(table, row, column)`: the cells of docs/support.md that a test stands for.

`row` and `column` may be functions of the test's parameters; a row may also be a list of rows, empty for none. Tables
without columns are filled by where the test ran. `refuses=True`: the test passes because the thing is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

Params = Mapping[str, Any]

HEAD_DIMS = {64: "head_dim 64", 128: "head_dim 128", 192: "head_dim 192", 256: "head_dim 256"}
HEAD_DIMS |= dict.fromkeys((17, 33, 100), "head_dim 17, 33 or 100")
MASKS = {"causal": "causal", "full": "full", "window": "causal window", "two sides": "window on both sides"}
PACK_MASKS = {"causal": "causal", "causal window": "causal windows", "bidirectional": "both ways"}


def cells(item: pytest.Item) -> list[str]:
    """Return the cells of a test as `table | row | column`, the column empty in tables without."""
    params: Params = getattr(getattr(item, "callspec", None), "params", {})
    found = []
    for marker in item.iter_markers("support"):
        table, rows, column = (*marker.args, "")[:3]
        rows, column = (value(params) if callable(value) else value for value in (rows, column))
        if column is not None:
            found += [f"{table} | {row} | {column}" for row in ([rows] if isinstance(rows, str) else rows)]
    return found


def refuses(item: pytest.Item) -> bool:
    """Return whether the test passes because its cells are refused."""
    values = [marker.kwargs.get("refuses", False) for marker in item.iter_markers("support")]
    params: Params = getattr(getattr(item, "callspec", None), "params", {})
    return any(value(params) if callable(value) else value for value in values)


def kernel(params: Params) -> str:
    """Return the column of the kernel of a test, whose parameter begins with its name."""
    given = params["name"] if "name" in params else params["kernel"]
    return f"`{given.split(',')[0]}`"  # behind a comma stands a variant of its call


def in_bfloat16(row: str) -> Callable[[Params], list[str]]:
    """Return a row for tests in bfloat16, and none for the others."""
    return lambda params: [row] if str(params["dtype"]) == "torch.bfloat16" else []


def of_block(params: Params) -> list[str]:
    """Return the rows of a block of attention: its dtype, its band, its heads or its head_dim."""
    case, dtype = params["case"], str(params["dtype"]).removeprefix("torch.")
    width, width_v = case.head_dim, case.head_dim_v or case.head_dim
    if (width, width_v) == (192, 128):
        return ["head_dim 192, v 128"] if dtype == "bfloat16" else []
    if (width, width_v) != (32, 32):
        return [HEAD_DIMS[width]] if dtype == "bfloat16" and width == width_v and width in HEAD_DIMS else []
    rows = [dtype]
    if dtype == "bfloat16":
        causal, square = (case.band.left, case.band.right) == (-1, 0), case.q_len == case.kv_len
        if case.band.is_full:
            rows.append("full blocks")
        elif not causal:
            rows.append("windows, offsets, other bands")
        elif square:
            rows.append("causal, square")
        if case.heads != case.kv_heads:
            rows.append("grouped heads")
    return rows


def schedule(params: Params) -> str:
    """Return the row of a schedule on its layout."""
    return f"`{params.get('schedule', 'greedy')}`, {params.get('layout', 'contiguous')} tokens"


def mask(params: Params) -> str | None:
    """Return the column of a mask of one document."""
    return MASKS.get(params["mask"])


def pack_mask(params: Params) -> str | None:
    """Return the column of a mask of packed documents; none for masks without a column."""
    name = PACK_MASKS.get(params["mask"])
    return name and f"packs: {name}"


def helped_by_causal_masks_only(params: Params) -> bool:
    """Return whether a balanced schedule refuses the mask: it needs a causal one."""
    return params["schedule"].startswith("balanced") and not re.match("causal|window", params["mask"])
