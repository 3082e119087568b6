"""Read text as tokens: Python's own manual, the bytes of a text file, or Megatron's indexed dataset."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from gpt.errors import UserError, user_error_if_impossible

BYTES = 256


class Tokens(Protocol):
    """A long row of tokens."""

    name: str
    vocabulary: int

    def __len__(self) -> int: ...

    def window(self, start: int, length: int) -> torch.Tensor:
        """Return tokens start <= i < start + length, int64."""
        ...


class ByteText:
    """A text in memory, one token per byte."""

    vocabulary = BYTES

    def __init__(self, name: str, text: bytes) -> None:
        self.name = name
        self._bytes = np.frombuffer(text, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._bytes)

    def window(self, start: int, length: int) -> torch.Tensor:
        """Return bytes start <= i < start + length, int64."""
        return torch.from_numpy(self._bytes[start : start + length].astype(np.int64))


class IndexedTokens:
    """The documents of Megatron's indexed dataset (PREFIX.bin, PREFIX.idx) end to end, read from disk as needed."""

    def __init__(self, prefix: str, vocabulary: int) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        _refuse_cut_index(Path(prefix + ".idx"))
        self.name, self.vocabulary = prefix, vocabulary
        self._documents: Any = IndexedDataset(prefix)
        self._ends = np.cumsum(self._documents.sequence_lengths, dtype=np.int64)
        self._refuse_cut_tokens(Path(prefix + ".bin"))

    def _refuse_cut_tokens(self, path: Path) -> None:
        """Refuse now a file that ends too early; otherwise training would fail at the first missing token."""
        index = self._documents.index
        stops = index.sequence_pointers + index.sequence_lengths.astype(np.int64) * index.dtype_size
        wanted, there = int(stops.max(initial=0)), path.stat().st_size
        if there < wanted:
            raise UserError(f"{path} is cut off: it has {there:,} bytes, and its index names {wanted:,}")

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def window(self, start: int, length: int) -> torch.Tensor:
        """Return tokens start <= i < start + length, int64, from as many documents as needed.

        Raises:
            UserError: a token is outside the vocabulary.
        """
        pieces: list[np.ndarray[Any, Any]] = []
        document, stop = int(np.searchsorted(self._ends, start, side="right")), start + length
        while start < stop:
            end = min(stop, int(self._ends[document]))
            begin = int(self._ends[document - 1]) if document else 0
            pieces.append(self._documents.get(document, offset=start - begin, length=end - start))
            start, document = end, document + 1
        tokens = np.concatenate(pieces).astype(np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise UserError(f"{self.name} holds token {tokens.max()}, outside --vocab-size {self.vocabulary}")
        return torch.from_numpy(tokens)


_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""The header of Megatron's .idx: magic, version, code of the dtype, number of sequences, number of documents."""


def _refuse_cut_index(path: Path) -> None:
    """Refuse a file that is no index, or that is shorter than its header says."""
    there = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_INDEX_HEADER.size)
    if len(head) < _INDEX_HEADER.size:
        raise UserError(f"{path} is cut off: it has {there} bytes, fewer than its header")
    magic, version, _, sequences, documents = _INDEX_HEADER.unpack(head)
    if (magic, version) != (b"MMIDIDX\x00\x00", 1):
        raise UserError(f"{path} is no index of Megatron's: it begins with {head[:17]!r}")
    wanted = _INDEX_HEADER.size + sequences * (4 + 8) + documents * 8  # lengths and pointers, then documents
    if there < wanted:
        raise UserError(f"{path} is cut off: it has {there:,} bytes, and its header names {wanted:,}")


def open_tokens(data: str | None, *, vocab_size: int | None, seq_length: int) -> Tokens:
    """Open the text or dataset that `--data` names.

    Raises:
        UserError: it is missing, empty, or shorter than one sequence and the token after it.
    """
    tokens = _manual() if data is None else _named(data, vocab_size)
    if vocab_size is not None and vocab_size < tokens.vocabulary:
        raise UserError(f"--vocab-size {vocab_size} is too small: text is read as {BYTES} different bytes")
    if len(tokens) == 0:
        raise UserError(f"{tokens.name} is empty")
    if len(tokens) < seq_length + 1:
        raise UserError(
            f"{tokens.name} has {len(tokens):,} tokens, fewer than one sequence needs: "
            f"--seq-length {seq_length:,} and the token after it; give a longer text or a smaller --seq-length"
        )
    return tokens


def _manual() -> Tokens:
    """Return the language reference that CPython ships for `help()`: half a megabyte of English, no download."""
    try:
        from pydoc_data.topics import topics
    except ImportError as missing:
        raise UserError("this Python comes without its manual (pydoc_data); name a text with --data FILE") from missing
    # Runs of one sign are lines and padding of tables. They teach nothing, and the loss would jump at them.
    prose = re.sub(r"([^\w\n])\1{3,}", r"\1\1\1", "\n\n".join(topics.values()))
    return ByteText("Python's language reference", prose.encode())


def _named(data: str, vocab_size: int | None) -> Tokens:
    path, halves = Path(data), (Path(data + ".bin"), Path(data + ".idx"))
    if path.is_file():
        with user_error_if_impossible(f"read --data {data}"):
            return ByteText(data, path.read_bytes())
    if path.is_dir():
        raise UserError(f"--data {data} is a directory; name a text file or the prefix of an indexed dataset")
    there = [half for half in halves if half.is_file()]
    if not there:
        raise UserError(f"--data {data}: there is no such text file, and no indexed dataset {halves[0]}, {halves[1]}")
    if len(there) == 1:
        missing = halves[1] if there[0] == halves[0] else halves[0]
        raise UserError(f"--data {data}: {there[0]} is there, but not {missing}")
    for half in halves:
        if half.stat().st_size == 0:
            raise UserError(f"{half} is empty")
    if vocab_size is None:
        raise UserError("an indexed dataset does not say how large its vocabulary is: add --vocab-size N")
    with user_error_if_impossible(f"read --data {data}"):
        return IndexedTokens(data, vocab_size)


def sample(tokens: Tokens, seq_length: int, *, seed: int, indices: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return a batch of whole sequences, the same on every rank for the same indices.

    Returns:
        tokens, labels, position_ids int64 and loss_mask float32, each (len(indices), seq_length).
    """
    starts = [_place(seed, index, len(tokens) - seq_length) for index in indices]
    rows = torch.stack([tokens.window(start, seq_length + 1) for start in starts])
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "position_ids": torch.arange(seq_length).expand(len(starts), -1).contiguous(),
        "loss_mask": torch.ones(len(starts), seq_length),
    }


def _place(seed: int, index: int, places: int) -> int:
    """Return a number below `places` that depends on seed and index only, not on the number of ranks."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % places
