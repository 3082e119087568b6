"""Print a report: the run, the reductions, one row for each kind of tensor, and the first difference."""

from __future__ import annotations

from collections.abc import Sequence

from dfa_megatron.selfcheck.run_case import Report


def text(report: Report) -> str:
    """Return the whole report as plain text."""
    case, found = report.case, report.comparison
    lines = [f"selfcheck: {case.title}", f"{case.ranks} ranks against one, on CPU", ""]
    if case.reduced:
        less = [(r.what, r.asked, r.runs) for r in case.reduced]
        lines += [*_columns(("reduced", "asked for", "checked with"), less), ""]
    if found.rows:
        rows = [
            (row.section, row.kind, str(row.tensors), f"{row.largest:.1e}", "differs" if row.different else "equal")
            for row in found.rows
        ]
        lines += [*_columns(("run", "compared", "tensors", "largest", ""), rows), ""]
        lines += [f"largest: |difference| over the tensor's largest entry; equal: at most {case.tolerance:.0e}", ""]
    lines += [f"not looked at: {line}" for line in case.unseen]
    if not found.differences:
        return "\n".join([*lines, f"{case.ranks} ranks compute what one rank computes"])
    first = found.differences[0]
    where = f"{first.section}, {first.kind}: " if first.section else f"{first.kind}: "
    lines += [f"first difference: {where}{first.what}"]
    if len(found.differences) > 1:
        lines += [f"and {len(found.differences) - 1} more"]
    return "\n".join(lines)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows))
    return ["  ".join(cells).rstrip() for cells in padded]
