"""Make the tables of measured figures: tables.toml says which cell is which row of which file of `benchmarks/results`.

A table of tables.toml has `lines` and `columns`. A cell is the one row that has the values of `where`, of its column
and of its line; later ones replace earlier ones. Two such rows, or none, are an error. `by` is the field whose value a
line gives by itself. "128K" is a number of tokens, and a field that is "" is absent. Beside fields there are:

- file: one or several, named without their year. as: the values that `where` starts from.
- show: an f-string over the row's fields; what is no letter or digit in their names is `_`.
- best: of the rows that have one of several values, the one with the largest of this field is shown.
- absent: what stands for a row or a field that a file lacks.
- mark: "max" or "min" of a column is bold, or of `every` so many lines. "cannot" is a method that refuses the shape.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
K = 1024
Lines = list[str]
Where = Mapping[str, Any]


def stored(name: str) -> Any:
    """Return a JSON file of this folder."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


@cache
def results(name: str) -> list[dict[str, Any]]:
    """Return the rows of a raw file, named without its year, as `11-22-4xh200-packed`."""
    file = json.loads((RESULTS / f"2026-{name}.json").read_text(encoding="utf-8"))
    return [one for key in ("rows", "results", "layers", "training", "runs") for one in file.get(key, [])]


def matching(name: str | Sequence[str], where: Where) -> list[dict[str, Any]]:
    """Return the rows of one or several files with these values, or with one of a list of values."""

    def fits(one: dict[str, Any], key: str, value: Any) -> bool:
        said = one.get(key)
        if isinstance(value, str) and re.fullmatch(r"\d+K", value):
            value = K * int(value[:-1])
        return said in value if isinstance(value, list) else said == value or (value == "" and said is None)

    rows = [one for file in ([name] if isinstance(name, str) else name) for one in results(file)]
    return [one for one in rows if all(fits(one, *item) for item in where.items())]


def row(name: str, **where: Any) -> dict[str, Any]:
    """Return the one row of a file with these values.

    Raises:
        LookupError: no row or several rows have them.
    """
    found = matching(name, where)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name} have {where}")
    return found[0]


def shown(form: str, one: dict[str, Any]) -> str | None:
    """Return a row in the form of a cell, or None if it lacks a field."""
    fields = {re.sub(r"\W+", "_", key): value for key, value in one.items()}
    try:
        return str(eval("f" + repr(form), {}, fields))  # noqa: S307 our own file
    except NameError:
        return None


def cell(where: Where) -> str:
    """Return a cell."""
    file, form, best, absent = (where.get(key) for key in ("file", "show", "best", "absent"))
    fields = {key: value for key, value in where.items() if key not in ("file", "show", "best", "absent", "mark")}
    rows = matching(file, fields)
    if absent is not None and not (rows := [one for one in rows if shown(form, one) is not None]):
        return str(absent)
    if len(rows) != max((len(value) for value in fields.values() if isinstance(value, list)), default=1):
        raise LookupError(f"{len(rows)} rows of {file} have {fields}")
    if all(one.get("state") == "refused" for one in rows):
        return "cannot"
    one = max(rows, key=lambda one: float(one[best])) if best else rows[0]
    return str(shown(form, one)) if not best or one[best] else "not run"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Lines:
    """Return a Markdown table."""
    first, *rest = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return [first, "|---" * len(head) + "|", *rest]


def bold(cells: list[str], best: Callable[..., float]) -> list[str]:
    """Mark the best number, and every cell that shows the same."""
    numbers = {text: float(text.replace(",", "")) for text in cells if text[:1].isdigit()}
    marked = best(numbers.values(), default=0)
    return [f"**{text}**" if numbers.get(text) == marked else text for text in cells]


@cache
def specification() -> dict[str, Any]:
    """Return tables.toml."""
    return tomllib.loads((DOCS / "tables.toml").read_text(encoding="utf-8"))


def made(page: str, name: str) -> Lines:
    """Return a table of tables.toml."""
    file = specification()
    spec = file[page][name]
    lines = file["lines"][spec["lines"]] if isinstance(spec["lines"], str) else spec["lines"]
    lines = {label: one if isinstance(one, dict) else {spec["by"]: one} for label, one in lines.items()}
    columns = []
    for column in spec["columns"].values():
        about = file["where"].get(spec.get("as"), {}) | spec["where"] | column
        cells, count = [cell(about | line) for line in lines.values()], spec.get("every", len(lines))
        if mark := about.get("mark"):
            parts = [cells[at : at + count] for at in range(0, len(cells), count)]
            cells = [one for part in parts for one in bold(part, {"min": min, "max": max}[mark])]
        columns.append(cells)
    return table([spec["corner"], *spec["columns"]], zip(lines, *columns, strict=True))


# What is computed of several rows.

GRID, PEERS = "11-26-4xh100-grid-flash4", "11-22-4xh200-peers-flash4"
LAYERS = "11-22-4xh200-megatron-layers"
ULYSSES = ["ulysses flash4", "deepspeed ulysses flash4"]


def faster(file: str, others: list[str], thousands: int, heads: int = 32, kv_heads: int = 32) -> float:
    """Return how many times as fast ours is as the fastest of some methods of attention."""
    where = {"seq_length": thousands * K, "heads": heads, "kv_heads": kv_heads}
    ours = row(file, method="dfa auto flash4", **where)["both_tflops"]
    rates = [row(file, method=one, **where)["both_tflops"] for one in others]
    return float(ours) / float(max(rates))


def training(ours: str, theirs: str, thousands: int) -> float:
    """Return the same of ZeRO-3 on four GPUs."""
    file, where = "11-22-4xh200-deepspeed-training-no-remat", {"shape": "llama-3-8b", "length": thousands * K}
    rates = [
        row(file, method=one, **where)["tokens_per_second_per_gpu"] for one in (f"dfa-{ours}", f"ulysses-{theirs}")
    ]
    return float(rates[0]) / float(rates[1])


def layer(ours: str, theirs: str, thousands: int = 128, groups: int = 8) -> float:
    """Return the same of a Megatron layer on four GPUs."""
    times = [row(LAYERS, mode=one, length=thousands * K, groups=groups)["ms_per_layer"] for one in (ours, theirs)]
    return float(times[1]) / float(times[0])


def spread(ratios: list[float]) -> str:
    """Return the least and the largest ratio."""
    low, high = (f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def in_short() -> Lines:
    """Return ratios on four GPUs, each within one run."""
    rings, lengths = ["pytorch allgather", "pytorch alltoall"], (32, 128)
    te, some = ["transformer_engine p2p"], ((32, 32), (32, 8))
    grid = [[faster(GRID, rings, n, *heads) for heads in (*some, (33, 33))] for n in lengths]
    peers = [[faster(PEERS, te, n, *heads) for heads in some] for n in lengths]
    both = [
        [faster(GRID, ULYSSES[:1], n, *heads) for heads in some] + [faster(PEERS, ULYSSES, n, *heads) for heads in some]
        for n in lengths
    ]
    remat, none = ([f"{training(*forms, n):.2f}" for n in lengths] for forms in (("remat", "full"), ("none", "none")))
    return table(["on four GPUs, how many times as fast", "32K tokens", "128K tokens"], [
        ["attention, beside PyTorch's `context_parallel`", *map(spread, grid)],
        ["attention, beside Transformer Engine's ring", *map(spread, peers)],
        ["attention, beside the fastest Ulysses on the same kernel, where the heads divide", *map(spread, both)],
        ["Megatron layer with rematerialization, beside Transformer Engine with full recomputation", "",
         f"{layer('remat', 'te-full'):.2f}"],
        ["the same, beside Transformer Engine without recomputation, which takes twice the memory", "",
         f"{layer('remat', 'te'):.2f}"],
        ["ZeRO-3 training with rematerialization, beside DeepSpeed's Ulysses with full checkpointing", *remat],
        ["ZeRO-3 training without checkpointing, both", *none],
    ])  # fmt: skip


def automatic() -> Lines:
    """Return ours with all defaults, and how many times as fast it is as the best of the others in the same run."""
    lines = []
    for link, name in (("NVLink", ""), ("`NCCL_P2P_DISABLE=1`", "-p2p-off"), ("sockets, 2 GB/s", "-sockets")):
        for heads, kv_heads in ((32, 32), (32, 8), (33, 33), (2, 2)):
            cells = []
            for length in (8192, 32768, 131072):
                where = {"heads": heads, "kv_heads": kv_heads, "seq_length": length, "state": "timed"}
                timed = matching(f"11-23-2xh200-automatic{name}", where)
                ours = [one["both_tflops"] for one in timed if one["kind"] == "ours"]
                others = [one["both_tflops"] for one in timed if one["kind"] != "ours"]
                cells.append(f"{ours[0]:.0f} ({ours[0] / max(others):.2f})" if ours and others else "not run")
            lines.append([link, f"{heads} on {kv_heads}", *cells])
    return table(["link", "heads", "8K", "32K", "128K"], [line for line in lines if set(line[2:]) != {"not run"}])


PAGES: dict[str, dict[str, Callable[[], Lines]]] = {
    page: {name: partial(made, page, name) for name in tables}
    for page, tables in specification().items()
    if page not in ("lines", "where")
}
PAGES["performance"]["in-short"], PAGES["measurements"]["automatic"] = in_short, automatic
