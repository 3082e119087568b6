"""Map the rows of a rank's buffers to tokens, for kernels that need the distance between tokens."""

from __future__ import annotations

from dfa_megatron.plan.language.geometry import Span
from dfa_megatron.plan.language.ir import Plan
from dfa_megatron.plan.lowering.landings import landings_of

Tokens = dict[tuple[int, str], tuple[Span, ...]]
"""(buffer, name that is read) -> the spans of the sequence that its rows hold, in order."""


def tokens_of(plan: Plan, rank: int, batch: int = 1) -> Tokens:
    """Return the tokens of every buffer that a rank's kernels read. Pass the plan and batch that were lowered.

    Adjacent rows need not be adjacent tokens, even within one kernel call. A rank's chunks may lie far apart, and their
    tiles are fused wherever their bands allow.
    """
    chunks, names, landings = plan.layout.chunks, [name for _, name in plan.phase.reads], landings_of(plan, batch)[rank]
    held = {(landings.own[name], name): [(0, plan.layout.spans(rank))] for name in names}
    for (step, peer, at), region in landings.regions.items():
        name, its = landings.messages.incoming[step][peer][at]
        if name in names:  # several parts, and several messages, may share a buffer
            spans = tuple(chunks[chunk] for chunk in its)
            held.setdefault((region.buffer, name), []).append((region.lo, spans))
    return {where: tuple(span for _, spans in sorted(parts) for span in spans) for where, parts in held.items()}
