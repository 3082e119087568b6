"""Machines as the cost model sees them: how fast blocks are computed and how fast messages travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dfa_megatron.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Hardware:
    """A profile of one rank and its link.

    Args:
        name: for people.
        flops_forward, flops_backward: floating-point operations per second that the attention kernel reaches.
        link_bytes_per_second: what a rank sends, and at the same time receives, per second; infinity is allowed.
        latency: seconds before the first byte of a message arrives.
        launch_overhead: seconds that every kernel call costs beside its arithmetic.

    Raises:
        UnsupportedError: a rate is not positive or a time is negative.
    """

    name: str
    flops_forward: float
    flops_backward: float
    link_bytes_per_second: float
    latency: float = 0.0
    launch_overhead: float = 0.0

    def __post_init__(self) -> None:
        for field in ("flops_forward", "flops_backward", "link_bytes_per_second"):
            if not getattr(self, field) > 0:
                raise UnsupportedError(f"{field}={getattr(self, field)}", "it must be positive", "a rate above 0")
        for field in ("latency", "launch_overhead"):
            if not 0 <= getattr(self, field) < math.inf:
                raise UnsupportedError(
                    f"{field}={getattr(self, field)}", "it must not be negative", "seconds, 0 or more"
                )


H200_NVLINK = Hardware("h200-nvlink", 600e12, 550e12, 340e9, 15e-6, 15e-6)
"""H200s of one host: cuDNN's attention in bfloat16 at 32K tokens, and NCCL send and receive beside it."""

H200_SLOW_LINK = Hardware("h200-slow-link", 600e12, 550e12, 24e9, 30e-6, 15e-6)
"""The same GPUs over 24 GB/s each way: a shared network card, or a host whose direct link is off."""

CPU_LOOPBACK = Hardware("cpu-loopback", 40e9, 30e9, 1e9, 2e-4, 5e-5)
"""Processes of one small machine over gloo; a rough figure."""

IDEAL_LINK = Hardware("ideal-link", 600e12, 550e12, math.inf)
"""No cost but arithmetic: what a schedule is worth if everything else is hidden."""

PROFILES: dict[str, Hardware] = {
    profile.name: profile for profile in (H200_NVLINK, H200_SLOW_LINK, CPU_LOOPBACK, IDEAL_LINK)
}


def profile_named(name: str) -> Hardware:
    """The profile of that name.

    Raises:
        UnsupportedError: no such profile; the known ones are named.
    """
    if name not in PROFILES:
        raise UnsupportedError(f"hardware {name!r}", "there is no such profile", "one of " + ", ".join(PROFILES))
    return PROFILES[name]
