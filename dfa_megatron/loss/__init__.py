"""Cross-entropy, log-probabilities and entropy of each token, without the logits of all tokens at once.

The head's product, the softmax and their gradients run per tile of tokens, also with the vocabulary cut over ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dfa_megatron.loss.deferred import scores_of
    from dfa_megatron.loss.documents import by_document
    from dfa_megatron.loss.head import Head
    from dfa_megatron.loss.memory import head_bytes
    from dfa_megatron.loss.scores import TokenScores, cross_entropy, token_scores

_HOME = {
    "Head": "head",
    "TokenScores": "scores",
    "by_document": "documents",
    "cross_entropy": "scores",
    "head_bytes": "memory",
    "scores_of": "deferred",
    "token_scores": "scores",
}

__all__ = ["Head", "TokenScores", "by_document", "cross_entropy", "head_bytes", "scores_of", "token_scores"]


def __getattr__(name: str) -> Any:
    """Load a public name from its module, so that `memory` needs no PyTorch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
