"""Masks for `mask=` of `dist_flash_attn_func`: which query i of a whole sequence attends to which key j.

Every function returns a `Mask`: disjoint rectangles of (query, key) pairs, each cut by a diagonal band. Positions are
those of the whole sequence, whatever the layout of the tokens. `union` makes a mask of any such rectangles.

The twelve static masks of the Long-Context Attention Benchmark (arXiv 2510.17896), and what makes them:

    full                          full(n)
    causal                        causal(n)
    full sliding window           sliding_window(n, w, w)
    causal sliding window         sliding_window(n, w)
    full document                 documents(lengths, causal=False)
    causal document               documents(lengths)
    prefix LM causal              prefix_lm(n, prefix)
    prefix LM document            prefix_lm_documents(lengths, prefix)
    share question                prompt_tree([question, answer, ...], [-1, 0, ...])
    causal blockwise              causal_blockwise(lengths)
    block causal document         block_causal_documents(lengths, block)
    global sliding                global_sliding(n, w, w)
"""

from dfa_megatron.plan.language.mask import *  # noqa: F403 -- its `__all__` is the one list of masks
from dfa_megatron.plan.language.mask import __all__ as _most
from dfa_megatron.plan.language.tree import prompt_tree as prompt_tree

__all__ = [*_most, "prompt_tree"]
