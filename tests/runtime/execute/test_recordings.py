"""Functions of tensors that are recorded once for each layout of them: replays do the same to other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron.runtime.execute.recordings import Act, Fields, Recordings
from tests.support.nan_memory import nan_memory


class Owner:
    """Counts runs, and adds to a tensor outside of the recorded operations."""

    def __init__(self) -> None:
        self.runs, self.added = 0, 1.0

    def scaled(self, act: Act, x: torch.Tensor, y: torch.Tensor) -> Fields:
        self.runs += 1
        total = torch.empty_like(x)
        total.copy_(x * 2 + y)
        act(Owner.add, total)
        return total[0], total.flatten()[1:]

    def add(self, total: torch.Tensor) -> None:
        if self.added < 0:
            raise ValueError("nothing to add")
        total += self.added

    def read(self, act: Act, x: torch.Tensor) -> Fields:
        self.runs += 1
        return (x * x.sum().item(),)


def expected(x: torch.Tensor, y: torch.Tensor, added: float) -> Fields:
    total = x * 2 + y + added
    return total[0], total.flatten()[1:]


def check(recordings: Recordings, owner: Owner, x: torch.Tensor, y: torch.Tensor) -> None:
    got = recordings.run(Owner.scaled, owner, (x, y))
    for mine, want in zip(got, expected(x, y, owner.added), strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=0)


def test_a_replay_does_the_same_to_other_tensors_and_calls_the_owner_that_it_is_given() -> None:
    recordings, owner = Recordings(), Owner()
    with nan_memory():
        for added in (1.0, 2.0, 3.0):
            owner.added = added
            check(recordings, owner, torch.randn(3, 4), torch.randn(3, 4))
    assert owner.runs == 1
    check(recordings, owner, torch.randn(4, 3).t(), torch.randn(3, 4))
    assert owner.runs == 2, "another layout is another recording"
    other = Owner()
    check(recordings, other, torch.randn(3, 4), torch.randn(3, 4))
    assert other.runs == 0


def test_an_error_of_a_call_is_passed_on_as_it_is() -> None:
    recordings, owner = Recordings(), Owner()
    x = torch.ones(2, 2)
    check(recordings, owner, x, x)
    owner.added = -1.0
    with pytest.raises(ValueError, match="nothing to add"):
        recordings.run(Owner.scaled, owner, (x, x))
    owner.added = 5.0
    check(recordings, owner, x, x)


def test_what_reads_values_or_meets_too_many_layouts_runs_as_it_stands() -> None:
    recordings, owner = Recordings(), Owner()
    for scale in (1.0, 3.0):
        x = torch.full((2,), scale)
        (got,) = recordings.run(Owner.read, owner, (x,))
        torch.testing.assert_close(got, x * 2 * scale)
    assert owner.runs == 2
    for _ in range(2):
        for offset in range(20):
            check(recordings, owner, torch.randn(50)[offset : offset + 4].view(2, 2), torch.randn(2, 2))
    assert 20 < owner.runs < 42


def test_it_runs_as_it_stands_where_another_mode_listens() -> None:
    class Listening(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    recordings, owner = Recordings(), Owner()
    with Listening():  # type: ignore[no-untyped-call]
        for _ in range(2):
            check(recordings, owner, torch.randn(2, 2), torch.randn(2, 2))
    assert owner.runs == 2
