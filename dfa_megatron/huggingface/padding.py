"""Check padding on the right. It needs no mask: under a causal mask later tokens do not affect a token.

So an `attention_mask` is honoured by checking that it says just that, and by checking that no padded token has a loss;
the outputs of padded tokens, which nobody uses, differ from those of an attention that masks them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dfa_megatron.huggingface.refusals import BATCHES
from dfa_megatron.runtime.comm.groups import resolve

IGNORED = -100
"""The label of a token that has no loss, as everywhere in transformers."""


def check_right(mask: torch.Tensor, group: str = "") -> None:
    """Check that a mask hides nothing but the ends of the sequences; collective, with one small message, in a group.

    Args:
        mask: (batch, local_seq), 0 for padding: this rank's part of the sequences.
        group: name of the group that shares them, "" for whole sequences on this rank.

    Raises:
        UnsupportedError: a padded token comes before another one; on all ranks alike.
    """
    real = mask.bool()
    contiguous = (real[:, 1:] <= real[:, :-1]).all()
    facts = torch.cat((real.sum(1), contiguous.long()[None]))
    whole = [facts]
    if group:
        channel = resolve(group)
        whole = [torch.empty_like(facts) for _ in range(channel.size())]
        dist.all_gather(whole, facts, group=channel)
    counts = torch.stack([part[:-1] for part in whole])  # (ranks, batch)
    full = counts == mask.shape[1]
    in_order = ((counts[1:] == 0) | full[:-1]).all()
    BATCHES.check(left_padding=not bool(in_order & torch.stack([part[-1] for part in whole]).all()))


def check_unlabelled(mask: torch.Tensor, labels: torch.Tensor) -> None:
    """Check that no padded token has a label, its own or, in shifted labels, the next token's.

    Args:
        mask: (batch, seq), 0 for padding.
        labels: (batch, seq).

    Raises:
        UnsupportedError: one has.
    """
    BATCHES.check(padded_labels=bool(((labels != IGNORED) & ~mask.bool()).any()))
