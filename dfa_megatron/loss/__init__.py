"""Cross-entropy, log-probabilities and entropy of each token, without the logits of all tokens at once.

The head's product, the softmax and their gradients run per tile of tokens, also with the vocabulary cut over ranks.
"""

from dfa_megatron.loss.deferred import scores_of
from dfa_megatron.loss.documents import by_document
from dfa_megatron.loss.head import Head
from dfa_megatron.loss.scores import TokenScores, cross_entropy, token_scores

__all__ = ["Head", "TokenScores", "by_document", "cross_entropy", "scores_of", "token_scores"]
