"""Which rank holds which tokens, as a value for `layout=`: any numbers of tokens, and keys of another sequence.

    layout = layouts.contiguous(tokens, ranks)                 # any number of tokens: the first ranks hold one more
    layout = layouts.of_lengths([5000, 4096, 0])               # numbers of your own
    layout = layouts.cross(layout, layouts.contiguous(keys, ranks))

Keys that are the same on every rank need no layout: attention over them is a call with a group of one.
"""

from __future__ import annotations

from dfa_megatron.plan.language.layout import Layout, contiguous, cross, of_lengths, zigzag, zigzag_documents
from dfa_megatron.plan.schedules.load_balanced import load_balanced

__all__ = ["Layout", "contiguous", "cross", "load_balanced", "of_lengths", "zigzag", "zigzag_documents"]
