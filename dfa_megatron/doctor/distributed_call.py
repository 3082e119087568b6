"""Measure distributed calls on the ranks of this machine: errors against float64, time, and the rate of the links.

Ranks compile and compare short calls while the caller checks kernels, and wait while it times them; then they time a
long call and messages. On GPUs each short call has ranks of its own, so that its kernels compile beside the others'.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dfa_megatron.attention import dist_flash_attn_func, dist_flash_attn_varlen_func
from dfa_megatron.doctor.dense import band_of
from dfa_megatron.doctor.kernel_trial import Trial, distances, exact, wrong
from dfa_megatron.doctor.start_ranks import USER_ERROR_STATUS
from dfa_megatron.doctor.world import World, join, stopwatch
from dfa_megatron.errors import DistAttentionError, UnsupportedError
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import Mask, documents
from dfa_megatron.runtime.comm.groups import channel_of
from dfa_megatron.runtime.comm.transport import Recv, Send, Transport
from dfa_megatron.runtime.counters import HOW
from dfa_megatron.runtime.cuda_driver import Copy
from dfa_megatron.runtime.prepare import QUIET, in_use
from dfa_megatron.sharding import layout_of_tokens, positions_of

logger = logging.getLogger(__name__)

MESSAGE = {"cuda": 1 << 26, "cpu": 1 << 20}
"""Bytes of the message whose rate is reported, by kind of device."""
_SHORT = 64
"""Tokens per rank of the calls that are compared."""
SLACK = 3.0
"""Factor on the limits of one kernel call, because partial results are rounded once more between ranks."""

CASES = ("causal", "window", "softcap", "pack")
"""What short calls are asked: every kind of mask, a cap, and documents in a layout of their own."""


class StartedRanks:
    """Ranks of this machine, which work as soon as they are started."""

    def __init__(self, shape: Trial, ranks: int, cases: Sequence[str] = CASES) -> None:
        self.ranks, self.failed, self.folder = ranks, "", tempfile.TemporaryDirectory()
        tokens, dtype = max(1, shape.q_len // ranks) * ranks, str(shape.dtype).removeprefix("torch.")
        sizes = json.dumps([tokens, shape.heads, shape.kv_heads, shape.head_dim, dtype, shape.device])
        sets = [[case] for case in cases] if shape.device == "cuda" else [[*cases]]
        self.files = [Path(self.folder.name, str(number)) for number in range(len(sets))]
        self.stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in sets]
        self.running: list[subprocess.Popen[bytes]] = []
        for file, some, store in zip(self.files, sets, self.stores, strict=True):
            command = [sys.executable, "-m", __name__, sizes, str(file), *some]
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
            place |= {"TORCHELASTIC_RESTART_COUNT": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            place |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // ranks))}
            for rank in range(ranks):
                words = {name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                self.running.append(subprocess.Popen(command, env=os.environ | words, stdin=subprocess.PIPE))  # noqa: S603

    def wait(self) -> None:
        """Wait until short calls have been compared, or a rank has failed, which ends the others."""
        while not self.failed and not all(file.exists() for file in self.files):
            codes = [process.poll() for process in self.running]
            if any(codes):
                self.failed = f"the ranks ended with status {next(filter(None, codes))}"
                for process in self.running:
                    process.kill()
            time.sleep(0.02)

    def result(self) -> dict[str, Any]:
        """Let the ranks go on and end; return what `compared` and `timed` return, or the failure."""
        self.wait()
        for process in self.running:
            process.stdin.close()  # type: ignore[union-attr]
        self.files.append(Path(self.folder.name, "timed"))
        self.wait()
        for process in self.running:
            process.wait()
        if self.failed:
            return {"ranks": self.ranks, "failed": self.failed}
        *parts, found = (dict(json.loads(file.read_text(encoding="utf-8"))) for file in self.files)
        merged = {name: {case: x for part in parts for case, x in part[name].items()} for name in parts[0]}
        off = [f"{case} {name}" for case, names in merged.pop("wrong").items() for name in names]
        return found | merged | {"ranks": self.ranks, "wrong": off}


def timed(long: Trial, world: World, ready: Callable[[], object], repetitions: int = 5) -> dict[str, Any]:
    """Return what a long call ran with, its seconds, and each transport's rate; call `ready` once it has compiled."""
    q, k, v, dout = (x.chunk(world.size, 1)[world.rank].clone() for x in long.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(dist_flash_attn_func(*leaves, causal=True), leaves, dout)

    times = []
    for number in range(2 + repetitions):
        if number == 2:
            ready()
        world.slowest([0.0])  # all ranks start together
        times.append(stopwatch(both, world.device))
    prepared = in_use()[-1]
    return {
        "kernel": prepared.kernel.name,
        "schedule": prepared.plan.schedule,
        "transport": HOW["transport"],
        "seconds": world.slowest([statistics.median(times[2:])])[0],
        "bytes_per_second": _rates(world),
    }


def compared(long: Trial, world: World, cases: Sequence[str] = CASES) -> dict[str, dict[str, Any]]:
    """Return by case the errors of short calls, which are beyond the limit, and why it is refused; collective."""
    short = replace(long, q_len=_SHORT * world.size, kv_len=_SHORT * world.size)
    found, refused = dict[str, dict[str, float]](), dict[str, str]()
    for name, case in _cases(short.q_len, world.size).items():
        if name in cases:
            try:
                found[name] = compare(case, short, world)
            except UnsupportedError as error:  # alike on every rank
                refused[name] = str(error)
    limits = {case: wrong(errors, long.dtype, SLACK) for case, errors in found.items()}
    return {"errors": found, "wrong": limits, "refused": refused}


@dataclass(frozen=True, slots=True)
class Case:
    """An attention to compare: the pairs that count, the tokens of each rank, and the public function's options."""

    visible: Band | Mask
    layout: Layout
    options: Mapping[str, Any]


def _cases(tokens: int, ranks: int) -> dict[str, Case]:
    """Return what `CASES` stand for."""
    whole, offsets = layout_of_tokens("contiguous", tokens, ranks), (0, 1, 1 + tokens // 3, tokens)
    mask, balanced = documents([b - a for a, b in pairwise(offsets)]), "load_balanced"
    packed, window = layout_of_tokens(balanced, tokens, ranks, offsets), (_SHORT * 3 // 4, 0)
    return {
        "causal": Case(CAUSAL, whole, {"causal": True}),
        "window": Case(band_of(True, window), whole, {"causal": True, "window_size": window}),
        "softcap": Case(FULL, whole, {"causal": False, "softcap": 2.0}),
        "pack": Case(mask, packed, {"causal": True, "cu_seqlens": offsets, "layout": balanced}),
    }


def compare(case: Case, trial: Trial, world: World) -> dict[str, float]:
    """Return the largest error over the ranks of each result, relative to dense float64 attention; collective.

    Raises:
        UnsupportedError: nothing serves the case.
    """
    inputs, here = trial.inputs(), positions_of(case.layout, world.rank, world.device)
    q, k, v, dout = (x[:, here] for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "cu_seqlens" in case.options:
        packed = dist_flash_attn_varlen_func(q[0], k[0], v[0], return_lse=True, **case.options)
        out, lse = packed[0][None], packed[1][None]
    else:
        out, lse = dist_flash_attn_func(q, k, v, return_lse=True, **case.options)
    got = (out.detach(), lse, *torch.autograd.grad(out, leaves, dout))
    exactly = exact(inputs, case.visible, case.options.get("softcap", 0.0))
    mine = distances(got, [x[:, :, here] if x.dim() == 3 else x[:, here] for x in exactly], dout, trial.kv_len)
    return dict(zip(mine, world.slowest(mine.values()), strict=True))


def _rates(world: World) -> dict[str, float]:
    """Return bytes per second of a large message to the next rank, by transport; empty on one rank."""
    if world.size == 1:
        return {}
    size = MESSAGE[world.device.type]
    transports = open_transports(world.device, size)
    return {name: size / _seconds_of_message(transport, world, size) for name, transport in transports.items()}


def open_transports(device: torch.device, largest: int) -> dict[str, Transport]:
    """Return every transport that works between all ranks of the default group, for messages of so many bytes."""
    over = channel_of(None)
    assert over is not None, "several ranks"
    found = {}
    for kind in ("p2p", "copy_engine") if device.type == "cuda" else ("p2p",):
        try:
            found[kind] = over.transports.get(device, kind)
        except UnsupportedError as error:
            logger.warning("%s is not measured: %s", kind, error.why)
            continue
        found[kind].reserve(largest)
    return found


def _seconds_of_message(transport: Transport, world: World, nbytes: int) -> float:
    """Send to the next rank and receive from the previous one, all at once; return the slowest rank's median."""
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)

    def exchange() -> None:
        incoming = transport.arena(nbytes, world.device)[:nbytes]
        transport.start()
        sends, receives = [Send(following, [outgoing], [Copy(0, 0, nbytes)])], [Recv(previous, [incoming])]
        transport.post(-1, lambda _: sends, receives)
        transport.land()
        transport.computed(0)
        transport.finish()

    world.slowest([0.0])  # all ranks start together
    taken = [stopwatch(exchange, world.device, times=3, behind=True) for _ in range(7)][2:]
    return world.slowest([statistics.median(taken)])[0]


def _tell(file: Path, found: dict[str, Any], world: World) -> None:
    """Write a file that is there when it is whole, and wait until the caller lets the ranks go on."""
    if world.rank == 0:
        file.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
        file.with_suffix(".part").replace(file)
    sys.stdin.read()


def main() -> int:
    """Run as one of the ranks of `StartedRanks`."""
    tokens, heads, kv_heads, head_dim, dtype, device = json.loads(sys.argv[1])
    os.environ[QUIET] = "1"  # the report says how the calls ran
    logging.getLogger("dfa_megatron.kernels").addFilter(lambda record: False)
    try:
        world = join(device)
        long = Trial.square(tokens, heads, kv_heads, head_dim, getattr(torch, dtype), str(world.device))
        file, found = Path(sys.argv[2]), compared(long, world, sys.argv[3:])
        ready = functools.partial(_tell, file, found, world)
        if file.name == "0":  # one set times
            _tell(file.with_name("timed"), timed(long, world, ready), world)
        else:
            ready()
    except DistAttentionError as error:
        print(f"doctor: one distributed call: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    world.leave()
    os._exit(0)  # an interpreter that ends in order takes seconds more


if __name__ == "__main__":
    sys.exit(main())
