"""Ranks whose calls part, or that stop, over NCCL and over the copy engines: every other rank ends with the reason."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dfa_megatron
from dfa_megatron.errors import DistAttentionError
from dfa_megatron.runtime.agreement.watchdog import EXIT_STATUS
from tests.support.arguments import arguments
from tests.support.workers import run_ranks

TRANSPORTS = ["p2p", "copy_engine"]


def attend(scale: float, transport: str, **options: object) -> torch.Tensor:
    """One attention with a backward, issued and not waited for."""
    q, k, v = (
        torch.randn(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    )
    asked = {"softmax_scale": scale, "transport": transport, "schedule": "balanced_shared"}
    out = dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, **asked, **options))
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    return out


def _parts(rank: int, ranks: int, transport: str, report: str) -> None:
    """Two known attentions, swapped on rank 1, and then more calls until the error comes."""
    for scale in (0.1, 0.2):
        attend(scale, transport)
    torch.cuda.synchronize()
    start, text = time.monotonic(), ""
    try:
        for scale in (0.1, 0.2) if rank else (0.2, 0.1):
            attend(scale, transport)
        while time.monotonic() < start + 10:
            time.sleep(0.1)
            attend(0.1, transport)
    except DistAttentionError as error:
        text = str(error)
    Path(f"{report}{rank}").write_text(f"{time.monotonic() - start:.2f}\n{text}")
    time.sleep(1.0)
    os._exit(0)  # the device may wait for ever


def fault(name: str, where: str, happens: str, seconds: float, transport: str) -> dict[str, object]:
    """What docs/trust.md says of a test."""
    shown = {"p2p": "NCCL", "copy_engine": "copy engines"}[transport]
    return {"fault": name, "where": where, "rank": 1, "happens": happens, "seconds": seconds, "transport": shown}


@pytest.mark.fault
@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_calls_that_part_on_gpus_are_told_within_seconds(
    transport: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    longest = 0.0
    with pytest.raises(AssertionError):  # no rank answers the test
        run_ranks(2, _parts, transport, f"{tmp_path}/", timeout=90, cuda=True)
    for rank in range(2):
        seconds, *text = (tmp_path / str(rank)).read_text().splitlines()
        assert "run different attentions, after " in "\n".join(text), text
        assert "softmax_scale=0.1" in "\n".join(text)
        assert float(seconds) < 4
        longest = max(longest, float(seconds))
    happens = "`DisagreementError`: run different attentions"
    record_property("fault", fault("two calls swapped", "forward", happens, round(longest, 1), transport))


def _ends(rank: int, ranks: int, transport: str, how: int, report: str) -> None:
    """Rank 1 is stopped or killed between two calls; rank 0 waits for the device in the second."""
    # A stopped rank is told after a quarter; the driver takes seconds to end a killed one.
    seconds = 12 if how == signal.SIGSTOP else 60
    group = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=seconds))
    attend(0.1, transport, group=group)
    torch.cuda.synchronize()
    time.sleep(1.5)  # each watchdog has heard the other
    if rank == 1:
        os.kill(os.getpid(), how)
    start = time.monotonic()
    Path(report).write_text(str(time.time()))
    try:
        attend(0.1, transport, group=group)
    except DistAttentionError as error:  # NCCL's sockets break at once
        print(error, file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)
    try:
        torch.cuda.synchronize()
    finally:
        Path(report).write_text(f"came back after {time.monotonic() - start}")


@pytest.mark.fault
@pytest.mark.gpu(2)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_ends_does_not_leave_the_others_waiting_on_their_device(
    transport: str, how: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str], record_property: Any
) -> None:
    report, grace = tmp_path / "report", 20.0 if how == signal.SIGKILL else 2.0
    with pytest.raises(AssertionError) as raised:
        run_ranks(2, _ends, transport, int(how), str(report), timeout=60, cuda=True, grace=grace)
    seconds = time.time() - float(report.read_text())
    told = capfd.readouterr().err
    name, word = ("SIGSTOP", "gives no sign of life") if how == signal.SIGSTOP else ("kill -9", "has ended")
    assert f"exit code {EXIT_STATUS}" in str(raised.value)
    assert f"rank 1 of the group {word}" in told
    assert seconds < 15
    happens = f"exit status {EXIT_STATUS}: {word}"
    record_property("fault", fault(name, "between two calls", happens, round(seconds, 1), transport))
