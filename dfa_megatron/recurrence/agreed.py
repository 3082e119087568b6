"""The exchanges of a recurrence over a group, which the ranks compare as they compare an attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.layout import Layout
from dfa_megatron.plan.language.mask import short_name
from dfa_megatron.recurrence.share import Parents, Share, edges_of
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.compared import Compared, compared, telling
from dfa_megatron.runtime.comm.groups import Group, resolve
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.cu_seqlens import CuSeqlens, Offsets, describe, offsets_of
from dfa_megatron.runtime.request import DEFAULTS


@lru_cache(maxsize=64)  # the same object for the layers of a pack: it keeps what it finds
def _share(place: tuple[int, int], tokens: int, layout: Layout | str, offsets: Offsets, parents: Parents) -> Share:
    """Return the share of a rank of so many, which has these tokens."""
    share = Share(place[0], edges_of(layout, tokens, place[1], offsets), offsets, parents)
    if share.tokens != tokens:
        what = f"{tokens} tokens on rank {share.rank} of a sequence that gives it {share.tokens}"
        why = f"the ranks hold {share.edges[-1]} tokens together: {share.held}"
        raise UnsupportedError(what, why, "layout=, the number of tokens of every rank")
    return share


@dataclass(frozen=True)
class Agreed(Compared):
    """An exchange of states or tokens that all ranks of a share make."""

    share: Share = field(kw_only=True)

    @contextmanager
    def running(self, phase: int, device: torch.device, nbytes: int = 0) -> Iterator[None]:
        """Count and compare what runs inside, as `Compared.running` does."""
        COUNTERS.state_exchanges += 1
        if phase:
            COUNTERS.state_backward_bytes += nbytes
        else:
            COUNTERS.state_forward_bytes += nbytes
        with super().running(phase, device):
            yield

    def gather(self, phase: int, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, by rank, in the forward (0) or the backward (1); collective.

        Raises:
            DisagreementError: the ranks run different calls; the message is a table.
        """
        assert self.over is not None, "a share that crosses ranks"
        sent = mine.contiguous().view(-1).view(torch.uint8)  # backends support different dtypes, but all bytes
        with self.running(phase, mine.device, sent.numel()):
            return [x.view(mine.dtype).view(mine.shape) for x in self.over.gather(sent)]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands in a sequence. over: None for one rank. verify: whether calls are compared."""

    group: dist.ProcessGroup | None
    over: Channel | None
    share: Share
    verify: bool

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        dim: int,
        group: Group,
        cu_seqlens: CuSeqlens,
        parents: Sequence[int] | None = None,
        *,
        layout: Layout | str = "contiguous",
        config: DistAttentionConfig = DEFAULTS,
    ) -> Place:
        """Return the place of tokens, which lie along dimension `dim` of x.

        Args:
            group, layout: as for `dist_scan`.
            cu_seqlens: global token offsets of packed documents; None for sequences that are one document.
            parents: of the documents, the segments of a prompt tree; None for no tree.
            config: its verify is used.

        Raises:
            UnsupportedError: cu_seqlens or parents do not fit the tokens, or this process is not in the group.
        """
        verify = config.verify == "on"
        with telling(group, verify=verify) as over:
            rank, ranks = (0, 1) if over is None else (over.rank, over.size)
            offsets = () if cu_seqlens is None else offsets_of(cu_seqlens, x.device)
            above = () if parents is None or max(parents, default=-1) < 0 else tuple(parents)
            return cls(resolve(group), over, _share((rank, ranks), x.shape[dim], layout, offsets, above), verify)

    def agree_on(self, what: str, facts: dict[str, str], device: torch.device) -> Agreed:
        """Return the exchange of that description; ranks compare it when it is new. Collective.

        Documents are compared at each call by their digest, so that a new pack costs no round of its own.

        Raises:
            DisagreementError: the ranks ask for different exchanges; the message is a table.
        """
        share = self.share
        facts = {"tokens of a rank": share.held, **facts}
        varying = [describe(share.offsets)] if share.offsets else []
        varying += [f"parents {short_name(share.parents)}"] if share.parents else []
        found = compared(what, self.over, facts, device, *varying, verify=self.verify)
        return Agreed(found.over, found.phases, share=share)
