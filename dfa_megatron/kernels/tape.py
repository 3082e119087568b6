"""A tape: the tensor operations of one run, recorded once, and replayed on other tensors without the code around them.

Recording sees every operation that passes PyTorch's dispatcher. Kernels of other libraries do not: their adapters hand
each launch to `launch`, and say so with `BlockKernel.replays`. The tape holds numbered registers. An operation is a
function, the registers that it reads and the one that it writes, so a replay is one short loop. All views of a tensor
become one `as_strided` each. Registers are freed after their last use, as the recorded run freed its tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from dfa_megatron.kernels.current_stream import stream_of

Registers = list[Any]
"""The values of one replay, by register."""


class Op(NamedTuple):
    """Call `function` on the registers `reads`, write the result to `writes`, then drop the registers in `frees`.

    holds: registers that must live until then, beside those that it reads.
    """

    function: Callable[..., Any]
    reads: tuple[int, ...]
    writes: int
    frees: tuple[int, ...] = ()
    holds: tuple[int, ...] = ()


class Unrecordable(Exception):  # noqa: N818 -- the run itself is right, and goes on
    """An operation cannot be replayed, such as one that reads a value back to the host."""


class Tape(TorchDispatchMode):
    """Records the operations of the code that runs inside, on these inputs: registers 0, 1, ... in their order.

    Constants of the code (tables, tensors that were there before) are kept as they are. A replay's inputs must have the
    shapes, strides, storage offsets, dtypes, devices and alignment of the recorded ones: see `signature`.

    ops: recorded since the last `cut`. why_not: why the run cannot be replayed, or "".
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.why_not = ""
        self._values: Registers = [None] * (len(inputs) + 1)
        self._sink = len(inputs)
        self._known: dict[int, _Tracked] = {}  # by the id of a tensor, which another may have after its end
        self._constants: dict[int, int] = {}
        self._views: dict[tuple[Any, ...], int] = {}
        self._recasts: dict[tuple[int, torch.dtype], int] = {}
        for register, x in enumerate(inputs):
            self._place(x, register)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it; one that is made of others is recorded as these."""
        kwargs = kwargs or {}
        if func not in _KINDS:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            _KINDS[func] = _kind(func)
        result = func(*args, **kwargs)
        if not self.why_not:
            try:
                self._record(func, args, kwargs, result)
            except Unrecordable as error:
                self.why_not = str(error)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nothing here needs to be kept from torch.compile, which takes a third of an operation's time."""
        return False

    def launch(self, function: Callable[..., object], *args: Any) -> None:
        """Record a launch that was just made; it writes into its arguments and returns nothing."""
        if not self.why_not:
            self._emit(function, args)

    def reserve(self) -> int:
        """Return a register that a replay fills with a value of its own; `record_call` may read it."""
        return self._value(None)

    def record_call(self, function: Callable[..., object], reads: tuple[int, ...], holds: tuple[int, ...] = ()) -> None:
        """Record a call that is no tensor operation, on registers; it returns nothing. holds: see `Op`."""
        self.ops.append(Op(function, reads, self._sink, holds=holds))

    def cut(self) -> list[Op]:
        """Return the operations since the last cut."""
        ops, self.ops = self.ops, []
        return ops

    def register(self, x: torch.Tensor) -> int:
        """Return the register of a tensor; a view of a register is made where it is first read."""
        known = self._find(x)
        if known is None:
            return self._constant(x)
        if known.is_whole:
            return known.register
        where = known.register, x.dtype, tuple(x.shape), x.stride(), x.storage_offset()
        if where not in self._views:
            self._views[where] = self._write(torch.as_strided, (known.register, *map(self._value, where[2:])))
        return self._views[where]

    def registers(self) -> Registers:
        """Return the registers as a replay begins with them: constants in place, the rest empty."""
        return list(self._values)

    def _find(self, x: torch.Tensor) -> _Tracked | None:
        known = self._known.get(id(x))
        return known if known is not None and known.tensor() is x else None

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if _KINDS[func] == "view":
            self._view(func, args[0], result)
            return
        if _KINDS[func] == "follows values":
            raise Unrecordable(f"{func} reads a value back to the host")
        if func in _EMPTY or (func in _ZEROS and result.is_contiguous()):
            new, laid = (torch.empty_strided, [result.stride()]) if func in _EMPTY else (torch.zeros, [])
            allocate = partial(new, tuple(result.shape), *laid, dtype=result.dtype, device=result.device)
            self._place(result, self._write(allocate, ()))
            return
        function = _FAST.get(func, func)
        if kwargs:
            named = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
            function = partial(func, **{name: value for name, value in kwargs.items() if name not in named})
            if named:
                function, args = _keyworded(function, len(args), tuple(named)), (*args, *named.values())
        register = self._emit(function, args)
        for number, x in enumerate(result) if isinstance(result, list | tuple) else [(None, result)]:
            if not isinstance(x, torch.Tensor) or self._find(x):  # in place: the register is that of its argument
                continue
            self._place(x, register if number is None else self._write(operator.itemgetter(number), (register,)))

    def _view(self, func: Any, base: torch.Tensor, result: Any) -> None:
        known = self._find(base)
        if known is None:  # a constant's view is a constant
            return
        for x in result if isinstance(result, list | tuple) else [result]:
            root = known.register
            if x.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
                raise Unrecordable(f"{func} copies, and is declared to make a view")
            if x.dtype != base.dtype:
                key = root, x.dtype
                if key not in self._recasts:
                    self._recasts[key] = self._emit(torch.Tensor.view, (base, x.dtype))
                root = self._recasts[key]
            if x is not base:
                same = x.shape == base.shape and x.stride() == base.stride()
                same = same and x.storage_offset() == base.storage_offset() and x.dtype == base.dtype
                self._known[id(x)] = _Tracked(ref(x), root, known.is_whole and same)

    def _emit(self, function: Callable[..., Any], args: Sequence[Any]) -> int:
        """Record an operation, and return the register of its result."""
        reads = []
        for position, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                reads.append(self.register(value))
            elif isinstance(value, list | tuple) and any(isinstance(x, torch.Tensor) for x in value):
                members = tuple(map(self.register, value))
                function, reads = _listed(function, position, len(members)), [*reads, *members]
            else:
                reads.append(self._value(value))
        return self._write(function, tuple(reads))

    def _write(self, function: Callable[..., Any], reads: tuple[int, ...]) -> int:
        self._values.append(None)
        register = len(self._values) - 1
        self.ops.append(Op(function, reads, register))
        return register

    def _place(self, x: torch.Tensor, register: int) -> None:
        self._known[id(x)] = _Tracked(ref(x), register, is_whole=True)

    def _constant(self, x: torch.Tensor) -> int:
        """Return the register of a tensor that was there before; it is kept."""
        if id(x) not in self._constants:
            self._constants[id(x)] = self._value(x)
        return self._constants[id(x)]

    def _value(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1


def recording() -> Tape | None:
    """Return the tape that records here, if one does: adapters hand it the launches of other libraries' kernels."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Tape) else None


def launched(function: Callable[..., object], *args: Any) -> None:
    """Make a launch of another library's kernel, which writes into its arguments, where a tape may record."""
    function(*args)
    tape = recording()
    if tape is not None:
        tape.launch(function, *args)


def call_recorded(action: Callable[..., object], *tensors: torch.Tensor) -> None:
    """Call what is no tensor operation on tensors; where a tape records, a replay calls it too."""
    tape = recording()
    with unrecorded():
        action(*tensors)
    if tape is not None:
        tape.record_call(action, tuple(map(tape.register, tensors)))


def recordable(device: torch.device) -> bool:
    """Return whether nothing else listens to the operations, and launches go to the tensors' device."""
    if _get_current_dispatch_mode() is not None:
        return False
    return device.type != "cuda" or (
        torch.cuda.current_device() == device.index and not torch.cuda.is_current_stream_capturing()
    )


def unrecorded() -> AbstractContextManager[None]:
    """Return a context for what a tape leaves out. Tensors made inside, such as tables, are constants to it."""
    return nullcontext() if recording() is None else _disable_current_modes()


def signature(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Return what a replay must have in common with the recorded run; the shapes of its tensors are known equal.

    The stream is part of it: tables that one has copied to the device may not be there yet for another. So are the
    current device, to which launches go, and PyTorch's modes that change what Python makes of an operation. A replay
    runs without autocast and function modes, as the recorded run did; precision is obeyed by the operations it calls.
    """
    kind = tensors[0].device.type
    found: list[Any] = [
        kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    ]
    if kind == "cuda":
        found += stream_of(tensors[0].device), torch.cuda.current_device()
    for x in tensors:
        found.append((x.stride(), x.storage_offset(), x.data_ptr() % _ALIGNMENT == 0))
    return tuple(found)


_WITH_AUTOCAST = ("cuda", "cpu")
_ALIGNMENT = 16
"""Bytes. Kernels with vector loads are chosen by this."""


class _Tracked(NamedTuple):
    """A tensor that a register holds, or a view of it.

    is_whole: the tensor is all that the register holds.
    """

    tensor: ref[torch.Tensor]
    register: int
    is_whole: bool


def _listed(function: Callable[..., Any], position: int, count: int) -> Callable[..., Any]:
    """Return the function for registers of which `count` from `position` on are one list."""

    def call(*args: Any) -> Any:
        return function(*args[:position], list(args[position : position + count]), *args[position + count :])

    return call


def _keyworded(function: Callable[..., Any], count: int, names: tuple[str, ...]) -> Callable[..., Any]:
    """Return the function for positional arguments of which all after the first `count` have these names."""

    def call(*args: Any) -> Any:
        return function(*args[:count], **dict(zip(names, args[count:], strict=True)))

    return call


_KINDS: dict[Any, str] = {}
"""`_kind` of operations that PyTorch does not run as others, as recording found out."""

aten = torch.ops.aten


def _kind(func: Any) -> str:
    """Return what is to know of an operator overload: its result is a "view", or the host "follows values"."""
    returned = func._schema.returns
    if returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write:
        return "view"
    marks = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return "follows values" if marks.intersection(func.tags) else ""


_EMPTY = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_empty_strided.default,
}  # fmt: skip
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}
"""Operations that allocate."""
_FAST: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: torch.Tensor.copy_,
    aten.zero_.default: torch.Tensor.zero_,
    aten.fill_.Scalar: torch.Tensor.fill_,
    aten.neg.default: torch.neg,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.clone.default: torch.clone,
}
"""The same without the Python code of `torch.ops`."""
