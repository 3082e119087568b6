"""Find the leaves of a fixed order that kernel calls and messages bring, by rows of their accumulators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dfa_megatron.plan.language.geometry import Tile
from dfa_megatron.plan.language.ir import Block, Plan, Transfer
from dfa_megatron.plan.language.leaves import Grid
from dfa_megatron.plan.language.program import Call, Region
from dfa_megatron.plan.lowering.lower import LeafRows
from dfa_megatron.plan.lowering.messages import carried_by


class Leaves:
    """The leaves that one rank computes, and those that land on it."""

    def __init__(self, plan: Plan, rank: int, grid: Grid) -> None:
        self.plan, self.rank, self.grid = plan, rank, grid
        self._side_of = {name: side for side, name in plan.phase.writes}
        self._carried, _ = carried_by(plan)
        self._keys: dict[tuple[int, int, Tile], tuple[int, int]] = {}

    def place(self, q_buffer: int, kv_buffer: int, tile: Tile, block: Block, number: int) -> None:
        """Note where a leaf of a step lies in the buffers that it is computed from."""
        keys = self.grid.key(block.kv_chunk, number), self.grid.key(block.q_chunk, number)
        self._keys[q_buffer, kv_buffer, tile] = keys

    def of_call(self, call: Call, tiles: Sequence[Tile]) -> Iterator[list[LeafRows]]:
        """Yield what each write of a call brings for these tiles."""
        for at, (write, read) in enumerate(zip(call.writes, (call.q, call.kv), strict=False)):
            by, rows = write.lo - read.lo, (tile.kv if at else tile.q for tile in tiles)
            keys = (self._keys[call.q.buffer, call.kv.buffer, tile][at] for tile in tiles)
            yield [LeafRows(span.lo + by, span.hi + by, key) for span, key in zip(rows, keys, strict=True)]

    def of_message(self, step: int, peer: int, chunk: int, into: Region) -> list[LeafRows]:
        """Return what a chunk of a message brings."""
        by, by_q = into.lo - self.plan.layout.chunks[chunk].lo, self._side_of[into.name] == "q"
        leaves = list[LeafRows]()
        for block in self._carried[Transfer(step, peer, self.rank, into.name, chunk)]:
            for number, tile in enumerate(self.plan.tiles(block)):
                rows, other = (tile.q, block.kv_chunk) if by_q else (tile.kv, block.q_chunk)
                leaves.append(LeafRows(rows.lo + by, rows.hi + by, self.grid.key(other, number)))
        return leaves
