"""Other distributed attentions, each adapted in one file, by the name that --peers takes."""

from __future__ import annotations

import importlib

from dfa_megatron.bench.job import Job
from dfa_megatron.bench.method import Method
from dfa_megatron.errors import UnsupportedError

PEERS = {
    "ulysses": "dfa_megatron.bench.peers.ulysses",
}
"""Each module has `methods(job)`; a method whose package is missing is among them, and refuses with the reason."""


def peer_methods(job: Job) -> list[Method]:
    """The methods of the peers that the job names.

    Raises:
        UnsupportedError: there is no such peer.
    """
    methods: list[Method] = []
    for name in job.peers:
        if name not in PEERS:
            raise UnsupportedError(f"peer {name!r}", "there is no such peer", "one of " + ", ".join(PEERS))
        methods += importlib.import_module(PEERS[name]).methods(job)
    return methods
