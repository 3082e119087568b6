"""The order of Transformer Engine's packs: every document is padded to a multiple of 2 x CP and cut zigzag by itself.

Rank r of P holds chunks r and 2P-1-r of the 2P equal chunks of each padded document, document after document. Inside
the layers tokens are contiguous: the real tokens of all documents in order, then all padding. Padding forms documents
of its own, which end with the ranks, so no token attends to it and it sends no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.runtime.cu_seqlens import Offsets, describe


@dataclass(frozen=True)
class DocumentOrder:
    """Hold the documents of a pack that is cut zigzag document by document."""

    real: Offsets
    """Cumulative lengths without padding."""
    padded: Offsets
    """Offsets with it; document i is tokens padded[i] to padded[i] + real[i + 1] - real[i]."""

    @classmethod
    @lru_cache(maxsize=64)  # every layer asks
    def of(cls, real: Offsets, padded: Offsets, ranks: int) -> DocumentOrder:
        """Return the order of a pack for `ranks` ranks; offsets that repeat as filling are left out.

        Raises:
            UnsupportedError: the offsets do not fit each other or the ranks.
        """
        fits = len(real) == len(padded)
        documents = list(zip(_lengths(real), _lengths(padded), strict=fits))
        fits = fits and all(0 <= length <= room for length, room in documents)
        if not fits:
            raise UnsupportedError(
                f"packed_seq_params with and without padding: {describe(real)} and {describe(padded)}",
                "every document must fit its padded length",
                "as many offsets in both, with no document longer than it is padded",
            )
        if uneven := next((room for _, room in documents if room % (2 * ranks)), None):
            raise UnsupportedError(
                f"a document of {uneven} tokens, padding included, cut zigzag by itself",
                f"its length must be a multiple of 2 x CP = {2 * ranks}",
                "cu_seqlens_q_padded; or declare_batch_layout(cp_group, 'zigzag') where whole rows are cut",
            )
        documents = [document for document in documents if document[1]]
        lengths, rooms = zip(*documents, strict=True)
        return cls((0, *accumulate(lengths)), (0, *accumulate(rooms)))

    def check_tokens(self, tokens: int) -> None:
        """Refuse a pack of other than the `tokens` that the ranks have together.

        Raises:
            UnsupportedError: says both numbers.
        """
        if self.padded[-1] != tokens:
            raise UnsupportedError(
                f"packed documents of {self.padded[-1]} tokens, padding included",
                f"the ranks hold {tokens} tokens together",
                f"offsets whose last one is {tokens}",
            )

    @lru_cache(maxsize=64)  # noqa: B019 an order is a value of a few numbers
    def inside(self, ranks: int) -> Offsets:
        """Return the global offsets of the documents inside the layers; padding comes last."""
        real, total = self.real[-1], self.padded[-1]
        longest = max(1, *_lengths(self.real))  # rotary tables are as long
        borders = range(0, total, total // ranks)
        cuts = [at for border in borders for at in range(max(border, real), border + total // ranks, longest)]
        return tuple(dict.fromkeys((*self.real, *cuts, total)))

    def positions(self, ranks: int, rank: int) -> torch.Tensor:
        """Return where a rank's tokens are inside the layers, int64 (tokens / ranks,), in the rank's order."""
        documents = (document.chunk(2 * ranks) for document in self.inside_of_rows().split(_lengths(self.padded)))
        return torch.cat([chunks[at] for chunks in documents for at in (rank, 2 * ranks - 1 - rank)])

    def inside_of_rows(self) -> torch.Tensor:
        """Return where every token of the padded row is inside the layers, int64 (tokens,)."""
        parts, tail = [], self.real[-1]
        for (lo, hi), room in zip(pairwise(self.real), _lengths(self.padded), strict=True):
            end = tail + room - (hi - lo)
            parts += [torch.arange(lo, hi), torch.arange(tail, end)]
            tail = end
        return torch.cat(parts)


@dataclass(frozen=True)
class RowOrder:
    """The zigzag order of the padded row, by which Megatron slices its multimodal rotary table."""

    documents: DocumentOrder

    def positions(self, ranks: int, rank: int) -> torch.Tensor:
        """Return where a rank's rows of that slice are inside the layers, int64 (tokens / ranks,)."""
        chunks = self.documents.inside_of_rows().chunk(2 * ranks)
        return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def _lengths(offsets: Offsets) -> list[int]:
    return [hi - lo for lo, hi in pairwise(offsets)]
