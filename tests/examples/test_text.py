"""The example's data: any text, Megatron's indexed dataset, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpt.errors import UserError
from gpt.text import IndexedTokens, open_tokens, sample


def indexed(prefix: Path, documents: list[list[int]]) -> str:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_the_default_is_english_prose_that_needs_no_download() -> None:
    tokens = open_tokens(None, vocab_size=None, seq_length=4096)
    assert tokens.vocabulary == 256
    assert len(tokens) > 200_000
    text = bytes(tokens.window(0, len(tokens)).tolist()).decode()
    assert text.count(" the ") > 1000


def test_a_text_is_read_byte_by_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(256)))
    tokens = open_tokens(str(path), vocab_size=None, seq_length=8)
    assert tokens.window(250, 6).tolist() == [250, 251, 252, 253, 254, 255]


def test_an_indexed_dataset_is_read_across_its_documents(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
    tokens = open_tokens(indexed(tmp_path / "set", documents), vocab_size=300, seq_length=4)
    assert isinstance(tokens, IndexedTokens)
    everything = [token for document in documents for token in document]
    assert len(tokens) == len(everything)
    for start in range(len(everything)):
        for length in range(1, len(everything) - start + 1):
            assert tokens.window(start, length).tolist() == everything[start : start + length]


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    tokens = open_tokens(indexed(tmp_path / "set", [[1, 2, 300, 4]]), vocab_size=300, seq_length=2)
    with pytest.raises(UserError, match="token 300, outside --vocab-size 300"):
        tokens.window(0, 4)


def test_labels_are_the_tokens_one_later_and_samples_depend_on_their_index_only(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(256)) * 4)
    tokens = open_tokens(str(path), vocab_size=None, seq_length=64)
    batch = sample(tokens, 64, seed=3, indices=[5, 6])
    assert {name: tuple(value.shape) for name, value in batch.items()} == dict.fromkeys(batch, (2, 64))
    assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    alone = sample(tokens, 64, seed=3, indices=[6])
    assert torch.equal(batch["tokens"][1:], alone["tokens"])
    assert not torch.equal(sample(tokens, 64, seed=4, indices=[6])["tokens"], alone["tokens"])


def test_missing_empty_and_short_data_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_bytes(b"a" * 100)
    (tmp_path / "half.bin").touch()
    (tmp_path / "hollow.bin").touch()
    (tmp_path / "hollow.idx").touch()
    said = {
        "nothing": "there is no such text file, and no indexed dataset",
        "empty.txt": "is empty",
        "short.txt": "has 100 tokens, fewer than one sequence needs: --seq-length 100",
        ".": "is a directory",
        "half": r"half.bin is there, but not .*half.idx",
        "hollow": r"hollow.bin is empty",
    }
    for name, message in said.items():
        with pytest.raises(UserError, match=message):
            open_tokens(str(tmp_path / name), vocab_size=None, seq_length=100)
    assert len(open_tokens(str(tmp_path / "short.txt"), vocab_size=None, seq_length=99)) == 100


def test_an_indexed_dataset_needs_the_size_of_its_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--vocab-size"):
        open_tokens(indexed(tmp_path / "set", [[1, 2, 3]]), vocab_size=None, seq_length=2)


def test_a_vocabulary_too_small_for_bytes_is_refused() -> None:
    with pytest.raises(UserError, match="too small"):
        open_tokens(None, vocab_size=100, seq_length=8)


@pytest.mark.parametrize(("end", "bytes_left"), [("idx", 20), ("idx", 60), ("bin", 19), ("bin", 4)])
def test_a_dataset_that_was_cut_off_is_named_before_it_is_read(tmp_path: Path, end: str, bytes_left: int) -> None:
    prefix = indexed(tmp_path / "set", [[1, 2, 3], [4, 5]])
    path = tmp_path / f"set.{end}"
    path.write_bytes(path.read_bytes()[:bytes_left])
    with pytest.raises(UserError, match=rf"set\.{end} is cut off: it has {bytes_left} bytes"):
        open_tokens(prefix, vocab_size=300, seq_length=2)


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "set", [[1, 2, 3], [4, 5]])
    (tmp_path / "set.idx").write_bytes(b"PK" + bytes(100))
    with pytest.raises(UserError, match="is no index of Megatron's"):
        open_tokens(prefix, vocab_size=300, seq_length=2)
