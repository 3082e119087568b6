"""A tape replays what ran on it, on other tensors; what it cannot replay it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from dfa_megatron.kernels.tape import Op, Tape, launched, recording, signature
from dfa_megatron.runtime.execute.bound import OpFailed, allocating_late, freeing, replay

Run = Callable[..., torch.Tensor]


def replayed(run: Run, recorded: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of a replay on the tensors of `given`."""
    with Tape(recorded) as tape:
        result = run(*recorded)
    assert not tape.why_not, tape.why_not
    last = tape.register(result)
    registers = tape.registers()
    registers[: len(given)] = given
    replay(freeing(tape.ops, set(), kept=frozenset({last})), registers)
    found: torch.Tensor = registers[last]
    return found


def of_views(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    part = x.transpose(0, 1)[2:5].unflatten(0, (3, 1)).squeeze(1)
    return part.contiguous() + y.narrow(1, 1, 4)[:3].detach()


def of_bytes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = x.view(torch.uint8).view(-1)
    words = flat[16:80].view(torch.float64).view(2, 4)
    flat[0:32].view(torch.float32).copy_(flat[32:64].view(torch.float32))
    return words + flat[0:64].view(torch.float64).view(2, 4) + y[:2, :4].to(torch.float64)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    total[1:3] += x[1:3]
    total.masked_fill_(x > 0, 3.0)
    first, second = total.chunk(2, 1)
    first.copy_(second)
    return torch.cat([total, x], 0)


def of_products(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = torch.stack([x, x * 2]).reshape(-1, x.shape[1])
    return torch.einsum("ij,kj->ik", both, x).softmax(0).topk(2, 0).values


@pytest.mark.parametrize("run", [of_views, of_bytes, in_place, of_products])
def test_a_replay_does_to_other_tensors_what_the_run_did(run: Run) -> None:
    recorded, given, again = (
        [torch.randn(4, 6, dtype=torch.float32, generator=torch.Generator().manual_seed(2 * seed + n)) for n in (0, 1)]
        for seed in range(3)
    )
    copies = [x.clone() for x in given]
    found = replayed(run, recorded, given)
    assert torch.equal(found, run(*copies))
    assert not torch.equal(found, run(*again)), "the results of other tensors differ"
    for x, y in zip(given, copies, strict=True):
        assert torch.equal(x, y), "inputs are written to where the run wrote to them"


def test_an_operation_that_copies_out_of_inference_mode_is_no_view() -> None:
    """Under an operator of torch.library composite operations come whole, `contiguous` among them."""

    @torch.library.custom_op("dfa_tests::turned", mutates_args=())
    def turned(x: torch.Tensor) -> torch.Tensor:
        with Tape([x]) as tape:
            result = (x * 2).t().contiguous() + 1
        last, registers = tape.register(result), tape.registers()
        registers[0] = x + 1
        replay(tape.ops, registers)
        found: torch.Tensor = registers[last]
        return found.clone()

    x = torch.randn(3, 5)
    assert torch.equal(turned(x), ((x + 1) * 2).t() + 1)


def test_a_tensor_with_the_id_of_one_that_has_ended_is_another() -> None:
    """What another library makes does not pass the dispatcher: it may get the id of a recorded tensor that is gone."""
    x, made = torch.ones(3), list[torch.Tensor]()
    with Tape([x]) as tape:
        recorded = [x * 2 for _ in range(100)]
        ended = {id(y) for y in recorded}
        del recorded
        with _disable_current_modes():
            while not made or (id(made[-1]) not in ended and len(made) < 1000):
                made.append(torch.full((3,), 5.0))
        result = x + made[-1]
    assert id(made[-1]) in ended
    last, registers = tape.register(result), tape.registers()
    registers[0] = x + 1
    replay(tape.ops, registers)
    assert torch.equal(registers[last], torch.full((3,), 7.0))


def test_launches_are_recorded_where_adapters_hand_them_over() -> None:
    def double(source: torch.Tensor, into: torch.Tensor, times: int) -> None:
        into.numpy()[...] = source.numpy() * times  # no operation of PyTorch

    def run(x: torch.Tensor) -> torch.Tensor:
        into = torch.empty_like(x)
        launched(double, x, into, 3)
        return into

    assert recording() is None
    assert torch.equal(replayed(run, [torch.ones(4)], [torch.arange(4.0)]), 3 * torch.arange(4.0))


def test_registers_are_freed_after_their_last_use_and_results_are_not() -> None:
    x = torch.ones(4)
    with Tape([x]) as tape:
        y = x + 1
        result = y * 2
    last, registers = tape.register(result), tape.registers()
    registers[0] = x
    replay(freeing(tape.ops, set(), kept=frozenset({last})), registers)
    assert [index for index, value in enumerate(registers) if isinstance(value, torch.Tensor)] == [0, last]


def test_memory_is_allocated_right_before_its_first_use_and_in_the_same_part() -> None:
    first, second, unread = (Op(partial(torch.empty_strided, (4,), (1,)), (), register) for register in (1, 2, 3))
    write, add = Op(torch.Tensor.fill_, (2, 5), 6), Op(torch.add, (2, 1), 7)
    ops = [first, second, unread, write, add]
    assert allocating_late(ops) == [second, write, first, add, unread]
    assert allocating_late(ops, [2]) == [first, second, write, add, unread]


def test_the_operation_that_failed_is_named() -> None:
    with Tape([torch.ones(2, 3)]) as tape:
        pass
    first = tape.reserve()
    for function in (lambda _: None, lambda _: 1 / 0):
        tape.record_call(function, (first,))
    with pytest.raises(OpFailed) as found:
        replay(tape.ops, tape.registers())
    assert found.value.at == 1
    assert isinstance(found.value.error, ZeroDivisionError)


def test_a_signature_tells_layouts_apart_and_not_values() -> None:
    x = torch.randn(4, 6)
    assert signature([x]) == signature([torch.zeros(4, 6)])
    for other in (
        x.t().contiguous().t(),
        torch.randn(5, 6)[1:],
        torch.randn(4, 8)[:, :6],
        torch.randn(25)[1:].view(4, 6),
    ):
        assert signature([x]) != signature([other])
