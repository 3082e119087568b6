"""Ranks listen where torch.distributed was told to and nowhere else, and call no deprecated collective."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import warnings

import pytest
import torch

import dfa_megatron
from tests.support.arguments import arguments
from tests.support.workers import over_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self is Linux's")


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket on which this process listens."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that the listing itself held
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as held:
                if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and held.family != socket.AF_UNIX:
                    found.add(held.getsockname()[:2])
    return found


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 listening everywhere is to be seen
def test_a_listening_socket_is_seen(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        name = server.getsockname()
        assert name in listening()
    assert name not in listening()


@over_ranks(2)
def test_attention_opens_no_socket_on_another_interface_than_gloo_was_given_and_calls_todays_collectives(
    rank: int, ranks: int
) -> None:
    """Workers give it the loopback. Of every kind of message, forward and backward."""
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for options in ({}, {"schedule": "ring"}, {"ulysses_degree": 2}):
            q, k, v = (torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3))
            dfa_megatron.dist_flash_attn_func(q, k, v, **arguments(causal=True, **options)).sum().backward()
        q, k, v = (torch.randn(8, 4, 8, requires_grad=True) for _ in range(3))
        dfa_megatron.dist_flash_attn_varlen_func(q, k, v, [0, 5, 8 * ranks], causal=True).sum().backward()
    assert [str(one.message) for one in said if issubclass(one.category, (FutureWarning, DeprecationWarning))] == []
    assert {address for address, _ in listening()} == {"127.0.0.1"}
