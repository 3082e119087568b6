"""The example's flags: what follows from the number of ranks, and what does not divide."""

from __future__ import annotations

import pytest

from gpt.errors import UserError
from gpt.flags import Sizes, parse_flags, settle


def sizes(ranks: int, *flags: str, cuda: bool = False) -> Sizes:
    return settle(parse_flags(flags), ranks, cuda=cuda)


def test_all_ranks_share_the_sequence_by_default() -> None:
    assert sizes(2) == Sizes(tensor=1, pipeline=1, context=2, data=1, micro_batches=1, bf16=False)
    assert sizes(4).context == 4


def test_ranks_that_nobody_asked_for_are_data_parallel() -> None:
    found = sizes(8, "--context-parallel-size", "2", "--tensor-model-parallel-size", "2", "--global-batch-size", "6")
    assert found == Sizes(tensor=2, pipeline=1, context=2, data=2, micro_batches=3, bf16=False)


def test_gpus_train_in_bfloat16_unless_told_otherwise() -> None:
    assert sizes(2, cuda=True).bf16
    assert not sizes(2, "--no-bf16", cuda=True).bf16


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (3, (), r"--seq-length 4096 cannot be divided by the 3 context-parallel ranks"),
        (2, ("--tensor-model-parallel-size", "4"), "2 ranks cannot be divided by tensor 4 x pipeline 1"),
        (4, ("--context-parallel-size", "3"), "4 ranks cannot be divided by tensor 1 x pipeline 1 x context 3"),
        (2, ("--num-query-groups", "3"), "--num-attention-heads 4 cannot be divided by --num-query-groups 3"),
        (2, ("--num-attention-heads", "3"), "--hidden-size 128 cannot be divided by --num-attention-heads 3"),
        (4, ("--pipeline-model-parallel-size", "2", "--num-layers", "3"), "--num-layers 3 cannot be divided"),
        (2, ("--context-parallel-size", "1", "--global-batch-size", "3"), "--global-batch-size 3 cannot be divided"),
        (2, ("--sequence-parallel",), "--sequence-parallel needs --tensor-model-parallel-size"),
        (2, ("--bf16",), "--bf16 needs GPUs"),
        (2, ("--train-iters", "0"), "--train-iters must be at least 1"),
        (2, ("--save-interval", "5"), "--save-interval needs --save DIR"),
        (2, ("--save", "x", "--use-distributed-optimizer"), "--save and --load do not work with --use-distributed-opt"),
        (2, ("--seq-length", "-4096"), "--seq-length must be at least 1"),
    ],
)
def test_what_does_not_fit_is_said_with_its_numbers(ranks: int, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sizes(ranks, *flags)
