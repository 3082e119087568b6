"""Ranks listen where torch.distributed was told to and nowhere else, and call no deprecated collective."""

from __future__ import annotations

import os
import socket
import struct
import sys
import warnings
from pathlib import Path

import pytest
import torch

import dfa_megatron
from tests.support.arguments import arguments
from tests.support.workers import over_ranks

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/net is Linux's")


def listening() -> set[tuple[str, int]]:
    """Address and port of every socket on which this process listens."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(descriptor))
        except FileNotFoundError:  # the one that the listing itself held
            continue
    mine = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in mine:
                address, port = fields[1].split(":")
                found.add((_shown(address), int(port, 16)))
    return found


def _shown(address: str) -> str:
    """An address as people write it; the kernel writes words in the machine's byte order."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))


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
