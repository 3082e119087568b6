"""Run a module as one of several "hosts" of one machine: each `RANKS_PER_HOST` ranks share one.

    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NET=Socket torchrun --nproc-per-node 2 -m benchmarks.own_host \
        benchmarks.attention --preset automatic --out DIR          # sockets between the two

NCCL and this package are told so. Messages between "hosts" take NCCL's network, over loopback where there is no other.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys


def main() -> None:
    """Name this rank's host and run the module of the first argument with the others."""
    host = f"host-{int(os.environ['RANK']) // int(os.environ.get('RANKS_PER_HOST', '1'))}"
    os.environ["NCCL_HOSTID"] = host
    socket.gethostname = lambda: host
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
