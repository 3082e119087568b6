"""Compare the recordings of many ranks with those of one rank, and find the first difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from dfa_megatron.selfcheck.case import Case
from dfa_megatron.selfcheck.record import Piece, Recording


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as on one rank."""

    section: str
    kind: str
    what: str
    """Name, rank and place, and the two values."""


@dataclass(slots=True)
class Row:
    """One kind of tensor in one section, over all ranks."""

    section: str
    kind: str
    tensors: int = 0
    largest: float = 0.0
    """The largest |difference|, over the largest entry of its whole tensor."""
    different: int = 0
    """Tensors that differ or are missing."""


@dataclass(slots=True)
class Comparison:
    """Every row, in the order of computation, and every difference, the first one first."""

    rows: list[Row] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def compare(case: Case, whole: Recording, ranks: Sequence[Recording]) -> Comparison:
    """Compare each rank's pieces with the same entries of the whole tensor; some rank must hold each entry."""
    found = Comparison()
    found.differences += _facts(case, ranks)
    for section, against in case.sections.items():
        wanted = {piece.key: piece for piece in whole.pieces if piece.section == against}
        got: dict[tuple[str, str], list[tuple[int, Piece]]] = {}
        for recording in ranks:
            for piece in recording.pieces:
                if piece.section == section:
                    got.setdefault(piece.key, []).append((recording.rank, piece))
        rows: dict[str, Row] = {}
        for key in [*wanted, *(key for key in got if key not in wanted)]:
            kind, name = key
            row = rows.setdefault(kind, Row(section, kind))
            row.tensors += 1
            if key not in wanted or key not in got:
                where = "by no rank" if key in wanted else "only where there are several ranks"
                found.differences.append(Difference(section, kind, f"{name} was computed {where}"))
                row.different, row.largest = row.different + 1, math.inf
                continue
            distance, what = _against(name, wanted[key], got[key], case.tolerance)
            row.largest = max(row.largest, distance)
            if what:
                row.different += 1
                found.differences.append(Difference(section, kind, what))
        found.rows += rows.values()
    return found


def _facts(case: Case, ranks: Sequence[Recording]) -> Iterable[Difference]:
    for name, wanted in case.facts.items():
        for recording in ranks:
            if (got := recording.facts.get(name, "nothing")) != wanted:
                yield Difference("", "what runs", f"rank {recording.rank}: {name}: {got}, asked for: {wanted}")
                break


def _against(name: str, one: Piece, pieces: list[tuple[int, Piece]], limit: float) -> tuple[float, str]:
    """Return the largest relative difference of all pieces, and a message if it exceeds the limit."""
    whole = one.values
    wanted = whole.double()
    scale = max(one.least, wanted.abs().max().item() if wanted.numel() else 0.0)
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    largest, said = 0.0, ""
    for rank, piece in pieces:
        index = _index(piece, whole)
        if index is None or wanted[index].shape != piece.values.shape:
            shape = tuple(piece.values.shape)
            return math.inf, f"{name} has the shape {shape} on rank {rank}, {tuple(whole.shape)} whole"
        covered[index] = True
        error = (piece.values.double() - wanted[index]).abs() / (scale or 1.0)
        error = torch.where(error.isnan(), math.inf, error)
        largest = max(largest, error.max().item() if error.numel() else 0.0)
        if not said and (error > limit).any():
            said = _place(name, rank, piece, whole, error, limit)
    if not said and not covered.all():
        return math.inf, f"{name}: {int((~covered).sum())} of {covered.numel()} entries were computed by no rank"
    return largest, said


def _index(piece: Piece, whole: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Where in the whole tensor the piece lies; None where it cannot lie in it."""
    if piece.values.dim() != whole.dim():
        return None
    places = [piece.places.get(d, torch.arange(size)) for d, size in enumerate(whole.shape)]
    if any(p.numel() and int(p.max()) >= size for p, size in zip(places, whole.shape, strict=True)):
        return None
    return tuple(torch.meshgrid(*places, indexing="ij")) if places else ()


def _place(name: str, rank: int, piece: Piece, whole: torch.Tensor, error: torch.Tensor, limit: float) -> str:
    """The first wrong token (else the first wrong entry), and the entry that is farthest off there."""
    wrong = error > limit
    dimension = piece.axes.index("token") if "token" in piece.axes else None
    if dimension is not None:
        order = piece.places.get(dimension, torch.arange(error.shape[dimension]))
        rows = wrong.movedim(dimension, 0).reshape(order.numel(), -1).any(1)
        token = int(order[rows].min())
        at_token = (order == token).view([-1 if d == dimension else 1 for d in range(error.dim())])
        error = torch.where(at_token, error, -1.0)
    local = torch.unravel_index(error.argmax(), error.shape) if error.dim() else ()
    entry = tuple(int(i) for i in local)
    globally = tuple(int(piece.places[d][i]) if d in piece.places else i for d, i in enumerate(entry))
    axes = piece.axes or tuple(f"index {d}" for d in range(error.dim()))
    said = sorted(zip(axes, globally, strict=True), key=lambda pair: pair[0] != "token")
    where = ", ".join(f"{axis} {i}" for axis, i in said)
    got, wanted = piece.values[entry].item(), whole[globally].item()
    return f"{name} on rank {rank}" + (f", {where}" if where else "") + f": {got:.6g}, on one rank {wanted:.6g}"
