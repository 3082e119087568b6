"""A network of ports for the simulator: a rank sends one message at a time and receives one at a time, on its link to
the ranks of its node and, beside it, on its adapter to other nodes.
"""

from __future__ import annotations

import heapq

from dfa_megatron.plan.cost.hardware import Hardware


class Wire:
    """One rank's queues: when its compute is done so far, and when its batches were posted and delivered."""

    def __init__(self) -> None:
        self.done = 0.0
        self.posted = 0.0
        self.delivered = 0.0

    def post(self, ready: float) -> None:
        """A batch follows the one before, and what it must wait for."""
        self.posted = max(self.delivered, ready)


class Network:
    """The messages of one step between all ranks."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.wires: list[Wire] = []
        self.times: dict[tuple[int, int], tuple[float, float]] = {}
        self._queued: list[tuple[int, int, int]] = []

    def send(self, src: int, dst: int, nbytes: int) -> None:
        """Queue a message of this step."""
        self._queued.append((src, dst, nbytes))

    def deliver(self) -> list[tuple[int, float, float]]:
        """Move all queued messages; returns (rank, from, to) of ranks whose compute has to wait for theirs.

        Of the messages that could go, the one that can start first does; a tie goes to the lower ranks.
        """
        if not self._queued:
            return []
        near, far, node = self.hardware.link, self.hardware.network, self.hardware.node
        posted = [wire.posted for wire in self.wires]
        ports = [(posted.copy(), posted.copy()) for _ in range(2)]  # (sending, receiving): of links, of adapters
        self.times.clear()
        heap = [(max(posted[src], posted[dst]), src, dst, nbytes) for src, dst, nbytes in self._queued]
        heapq.heapify(heap)
        while heap:
            start, src, dst, nbytes = heapq.heappop(heap)
            outside = far is not None and node(src) != node(dst)
            sending, receiving = ports[outside]
            now = max(sending[src], receiving[dst])
            if now > start:
                heapq.heappush(heap, (now, src, dst, nbytes))
                continue
            end = start + (far if far is not None and outside else near).seconds(nbytes)
            sending[src] = receiving[dst] = end
            self.times[src, dst] = (start, end)
        ranks = sorted({rank for src, dst, _ in self._queued for rank in (src, dst)})
        self._queued.clear()
        waits = []
        for rank in ranks:
            wire = self.wires[rank]
            wire.delivered = max(times[rank] for pair in ports for times in pair)
            if wire.delivered > wire.done:
                waits.append((rank, wire.done, wire.delivered))
                wire.done = wire.delivered
        return waits
