"""The copy engines' protocol, on simulated queues: any interleaving ends, and nobody reads what is not there or gone.

The transport's own code queues the operations; only the driver, streams and events under it are simulated. What a rank
queues runs in the order of its streams and otherwise at random, among ranks and among a rank's streams.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dfa_megatron.plan.interpret import rank_loop
from dfa_megatron.plan.language.mask import Mask, causal, documents, full
from dfa_megatron.plan.language.program import Call, Merge, Program
from dfa_megatron.plan.language.sizes import Sizes
from dfa_megatron.plan.lowering.kernel_calls import ANY
from dfa_megatron.runtime.agreement.calls import Calls, Kind
from dfa_megatron.runtime.comm import copy_engine, transport
from dfa_megatron.runtime.comm.copy_engine import CopyEngineTransport
from dfa_megatron.runtime.comm.transport import Recv, Send
from dfa_megatron.runtime.cuda_driver import Copy, Flag, Flags
from dfa_megatron.runtime.environment import without_multicast
from dfa_megatron.runtime.execute.memory import MemoryPlan, placed, rows_of
from tests.support.plan_cases import plan_of

Operation = Callable[[], bool]
"""Does it and says True, or says False where it has to wait."""
FORM = Sizes(1, 2, 1, 8, 8, "bfloat16", "delta")


class World:
    """Memory and queues of all ranks."""

    def __init__(self, ranks: int, one_queue: bool) -> None:
        self.one_queue = one_queue
        self.content: dict[int, object] = {}
        self.queues: list[dict[str, deque[Operation]]] = [{} for _ in range(ranks)]
        self.next_address, self.lost = 1, False

    def put(self, rank: int, stream: str, operation: Operation) -> None:
        self.queues[rank].setdefault("all" if self.one_queue else stream, deque()).append(operation)

    def new_address(self, size: int = 1) -> int:
        self.next_address += size
        return self.next_address - size

    def run(self, draw: random.Random) -> None:
        waiting = self.settle(draw)
        assert not waiting, f"nobody can go on: {sorted(waiting)}"

    def settle(self, draw: random.Random) -> set[tuple[int, str]]:
        """Run until nobody can go on; return the queues that wait."""
        waiting = {(rank, name) for rank, queues in enumerate(self.queues) for name in queues}
        while waiting:
            for rank, name in draw.sample(sorted(waiting), len(waiting)):
                queue = self.queues[rank][name]
                moved = False
                while queue and queue[0]():
                    queue.popleft()
                    moved = True
                    if draw.random() < 0.3:
                        break
                if not queue:
                    waiting.discard((rank, name))
                if moved:
                    break
            else:
                return {at for at in waiting if self.queues[at[0]][at[1]]}
        return waiting


class Event:
    """What CUDA's does: a wait is for the latest record that was queued before it."""

    def __init__(self) -> None:
        self.last = {"done": True}

    def record(self, stream: Stream) -> None:
        record = self.last = {"done": False}
        stream.world.put(stream.rank, stream.name, lambda: record.update(done=True) is None)

    def query(self) -> bool:
        return self.last["done"]


class Stream:
    """A queue of one rank."""

    def __init__(self, world: World, rank: int, name: str) -> None:
        self.world, self.rank, self.name, self.cuda_stream = world, rank, name, name
        self.device = torch.device("cpu")

    def wait_event(self, event: Event) -> None:
        record = event.last
        self.world.put(self.rank, self.name, lambda: record["done"])

    def query(self) -> bool:
        return not self.world.queues[self.rank].get(self.name)

    def synchronize(self) -> None:
        self.world.settle(random.Random(0))
        assert self.query()


class Driver:
    """The driver's operations on simulated memory."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank

    def copy(self, stream: str, to: int, source: int, copy: Copy) -> None:
        to, source = to + copy.offset, source + copy.skip
        content = self.world.content
        self.world.put(self.rank, stream, lambda: content.update({to: content[source]}) is None)

    def flags(self, stream: str, flags: Flags, token: int) -> None:
        for flag in flags.flags:
            self.world.put(self.rank, stream, self._flag(flag, token if flag.token else 0))

    def _flag(self, flag: Flag, value: int) -> Operation:
        content = self.world.content
        if flag.wait:
            return lambda: content.get(flag.address, 0) == value
        return lambda: content.update({flag.address: value}) is None


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a transport compute on the simulated stream that it has in place of a device, without PyTorch's own."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(transport, "current_stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)


def transports(world: World, ranks: int, arena_bytes: int) -> list[CopyEngineTransport]:
    flags = [world.new_address(8 * ranks) for _ in range(ranks)]
    arenas = [world.new_address(arena_bytes) for _ in range(ranks)]
    made = []
    for rank in range(ranks):
        one = object.__new__(CopyEngineTransport)
        one.driver, one._finished = Driver(world, rank), Event()  # type: ignore[assignment]
        one.stream, one.device = Stream(world, rank, "moves"), Stream(world, rank, "computes")  # type: ignore[assignment]
        one.started, one.filled = Event(), Event()  # type: ignore[assignment]
        one.free = [Event() for _ in range(64)]  # type: ignore[misc]
        one._place_flags(rank, flags)
        one._addresses, one._sending, one._batches = arenas, (), {}
        one._queue, one._finished_on = "moves", one.stream  # type: ignore[assignment]
        one._issued, one._captured, one._releases = deque(), set(), Stream(world, rank, "releases")  # type: ignore[assignment]
        one.over = SimpleNamespace(calls=Calls())  # type: ignore[assignment]
        made.append(one)
    return made


def memory_of(schedule: str, mask: Mask, ranks: int) -> tuple[list[list[MemoryPlan]], int]:
    """The memory of every rank in the forward and in the backward, and the bytes of an arena for both."""
    phases = plan_of(schedule, mask, ranks).phases
    memories = [[placed(phase, rank, FORM, ANY) for rank in range(ranks)] for phase in phases]
    return memories, max(memory.arena_bytes for phase in memories for memory in phase) + 1


class Reader:
    """The algebra that notes what each call must find where its messages landed."""

    def __init__(self, world: World, memory: MemoryPlan, rank: int, arena: int) -> None:
        self.world, self.memory, self.rank, self.arena = world, memory, rank, arena
        self.wanted: dict[int, dict[int, object]] = {}
        self.step = 0

    def begin(self, step: int) -> None:
        self.step = step

    def compute(self, call: Call) -> None:
        self.read(call.q.buffer)
        self.read(call.kv.buffer)

    def merge(self, merge: Merge) -> None:
        self.read(merge.source.buffer)

    def end(self, step: int) -> None:
        pass

    def read(self, buffer: int) -> None:
        for address, token in self.wanted.get(buffer, {}).items():

            def look(address: int = address, token: object = token) -> bool:
                found = self.world.content.get(address)
                assert found == token or self.world.lost, f"rank {self.rank} reads {found}, not {token}"
                return True

            self.world.put(self.rank, "computes", look)

    def landed(self, message: Any, call: int) -> None:
        """From now on the calls that read this buffer must find what its peer sent in this step."""
        number, arena = itertools.count(), torch.empty(self.memory.arena_bytes, dtype=torch.uint8)
        for (region,) in message.parts:
            wanted = self.wanted.setdefault(region.buffer, {})
            for x in self.memory.landed(arena)[region.buffer][region.name]:
                rows = rows_of(x, region.lo, region.hi)
                start = self.arena + rows.storage_offset() * rows.itemsize
                wanted[start] = (call, self.step, message.peer, self.rank, next(number))


def queue_call(
    world: World, transport: CopyEngineTransport, memory: MemoryPlan, rank: int, arena: int, call: int
) -> None:
    """Queue one whole run of one rank's program."""
    program: Program = memory.program
    reader = Reader(world, memory, rank, arena)
    calls = transport.over.calls
    calls.doing = "runs"
    calls.add(Kind.of(f"call {call}"))
    transport.start()
    for kind, number, step in rank_loop(program, reader):
        if kind == "post":
            if number:
                transport.computed(number - 1)

            def sends(_: bool, number: int = number, step: Any = step) -> list[Send]:
                messages = []
                for message in step.sends:
                    offsets = memory.offsets[number, message.peer]
                    tensors = []
                    for index in range(len(offsets)):
                        address = world.new_address()
                        world.content[address] = (call, number, rank, message.peer, index)
                        tensors.append(SimpleNamespace(data_ptr=lambda address=address: address, nbytes=1))
                    messages.append(Send(message.peer, tensors, [Copy(0, start, 1) for start in offsets]))  # type: ignore[arg-type]
                return messages

            if step.sends or step.receives:
                transport.post(step.after, sends, [Recv(message.peer, []) for message in step.receives])
        else:
            if step.sends or step.receives:
                transport.land()
            for message in step.receives:
                reader.landed(message, call)
    transport.finish()


PACK = documents([15, 1, 9, 2, 5])


@pytest.mark.support("runtime", "copy engines against every interleaving (a model of them)")
@pytest.mark.parametrize("one_queue", [False, True], ids=["streams apart", "one queue for all streams"])
@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("balanced_shared", 2),
        ("balanced_shared", 4),
        ("balanced_shared", 5),
        ("balanced", 6),
        ("zigzag", 4),
        ("ring", 4),
        ("load_balanced", 4),
        ("greedy", 3),
    ],
)
def test_any_interleaving_ends_and_reads_what_was_sent(schedule: str, ranks: int, one_queue: bool) -> None:
    masks = {"ring": full(ranks * 8), "load_balanced": PACK, "greedy": documents([17, 1, 2, 3, 1])}
    mask = masks.get(schedule, causal(ranks * 8))
    memories, arena_bytes = memory_of(schedule, mask, ranks)
    for seed in range(6):
        world = World(ranks, one_queue)
        made = transports(world, ranks, arena_bytes)
        call = 0
        for _ in range(2):
            for phase in memories:
                call += 1
                for rank in range(ranks):
                    queue_call(world, made[rank], phase[rank], rank, made[rank]._addresses[rank], call)
        world.run(random.Random(seed))
        assert not any(world.content.get(address) for one in made for address in (*one._my_ready, *one._my_filled)), (
            "every flag is down again"
        )


@pytest.mark.parametrize(("schedule", "ranks"), [("balanced_shared", 2), ("balanced", 5), ("greedy", 3)])
def test_ranks_that_wait_for_a_lost_one_are_let_go(schedule: str, ranks: int) -> None:
    """A rank does some of what it has queued and no more; every queue of the others comes to an end."""
    memories, arena_bytes = memory_of(schedule, causal(ranks * 8), ranks)
    waited = 0
    for seed in range(12):
        world, draw = World(ranks, one_queue=False), random.Random(seed)
        made, gone = transports(world, ranks, arena_bytes), draw.randrange(ranks)
        for call, phase in enumerate(2 * memories, 1):
            for rank in range(ranks):
                queue_call(world, made[rank], phase[rank], rank, made[rank]._addresses[rank], call)
        for queue in world.queues[gone].values():
            for _ in range(draw.randrange(len(queue) + 1)):
                queue.pop()
        world.settle(draw)
        world.queues[gone], world.lost = {}, True
        others = [one for rank, one in enumerate(made) if rank != gone]
        waited += any(not one.stream.query() for one in others)
        for one in others:
            assert not one.release()
        assert not world.settle(draw)
    assert waited > 6


def test_a_transport_that_does_not_wait_until_memory_is_free_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyEngineTransport, "wait_for_compute", lambda self, after: None)
    with pytest.raises(AssertionError, match="reads"):
        test_any_interleaving_ends_and_reads_what_was_sent("balanced", 6, False)


def test_the_flags_of_another_call_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 leaves a call out: with flags that only say up or down it would read what another call has sent."""
    (memories, _), arena_bytes = memory_of("balanced_shared", causal(16), 2)

    def run() -> None:
        world = World(2, one_queue=False)
        made = transports(world, 2, arena_bytes)
        for rank, calls in ((0, (1, 2, 3)), (1, (1, 3))):
            for call in calls:
                queue_call(world, made[rank], memories[rank], rank, made[rank]._addresses[rank], call)
        world.run(random.Random(0))

    with pytest.raises(AssertionError, match="nobody can go on"):
        run()
    monkeypatch.setattr(Calls, "token", lambda self, captured: 1)
    with pytest.raises(AssertionError, match="reads"):
        run()


def test_a_call_that_the_caller_captures_pins_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = transports(World(1, one_queue=False), 1, 1)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        alone.start()
        assert alone.pinned == capturing


def test_flags_are_laid_out_as_the_driver_reads_them() -> None:
    flags = Flags([Flag(True, 0x1234, True), Flag(False, 0x5678, False)])
    flags.set_token(77)
    words = memoryview(bytes(flags.queued)).cast("Q").tolist()
    assert [x & 0xFFFFFFFF for x in words] == [1, 0x1234, 77, 1, 0, 0, 2, 0x5678, 0, 0, 0, 0]


def test_a_machine_without_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "between GPUs, not on cpu" in copy_engine._local_refusal(torch.device("cpu"))
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE=1" in copy_engine._local_refusal(torch.device("cuda", 0))


def test_ranks_on_several_hosts_or_of_one_gpu_are_refused() -> None:
    device, over = torch.device("cuda", 0), SimpleNamespace(size=2)
    facts = [{"host": "a", "device": "0", "gpu": "one", "why": ""} for _ in range(2)]
    assert copy_engine.refusal(over, device, facts) == "ranks share a GPU"
    facts[1]["host"] = "b"
    assert copy_engine.refusal(over, device, facts) == "the ranks are on several hosts"


def test_multicast_is_off_while_memory_is_mapped_and_the_environment_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.delenv(name, raising=False)
    with suppress(RuntimeError), without_multicast():
        assert os.environ[name] == "1"
        raise RuntimeError("no memory")
    assert name not in os.environ
    monkeypatch.setenv(name, "0")
    with without_multicast():
        assert os.environ[name] == "0"
    assert os.environ[name] == "0"
