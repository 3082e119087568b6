"""Checkpoint without a second attention: save each (out, lse), recompute the rest (paper, section 3.3).

A *region* is one call of a checkpoint function. Its first pass saves the (out, lse) of every distributed attention. Its
recompute takes them in call order, so neither a kernel's forward nor a message runs twice:

    first pass   ln - qkv - attention ------ proj - mlp      saves the region's inputs and (out, lse)
                               | record
    recompute    ln - qkv ---- take -------- proj - mlp      attention's backward has q, k, v, out and lse

A *frame* is one pass through a region; attention finds the current one by `active_frame`. A frame belongs to a call and
not to a layer, so micro-batches may come back in any order. Regions may be nested. An attention records in every
enclosing first pass. A first pass inside a recompute takes from that recompute, so the attention still runs once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from dfa_megatron.errors import RematError, UnsupportedError
from dfa_megatron.names import say_once
from dfa_megatron.remat.saved import HostKept, Kept
from dfa_megatron.remat.saved import keeping_inputs_on_host as keeping_inputs_on_host
from dfa_megatron.runtime.counters import COUNTERS
from dfa_megatron.runtime.op import ACTIVE
from dfa_megatron.runtime.op import active_frame as active_frame

logger = logging.getLogger(__name__)

Contexts: TypeAlias = tuple[AbstractContextManager[None], AbstractContextManager[None]]
"""The context of the first pass and the context of the recompute."""

SAVED_OPERATORS = frozenset({"dfa_megatron::attention"})
"""Qualified names of the operators whose outputs selective checkpointing saves."""


class _SavedRegion:
    """Hold the pairs that one call of a checkpoint function saves; None stands for a pair that was taken."""

    __slots__ = ("__weakref__", "kept", "offload", "recorded")

    def __init__(self, offload: bool = False) -> None:
        self.kept: list[Kept | None] = []
        self.offload = offload
        self.recorded = False

    def drop(self) -> None:
        """Release every pair. The places stay, so that a second request gets an error that explains it."""
        self.kept = [None] * len(self.kept)


class Frame:
    """Save or find the (out, lse) of each attention in one pass through a region, the first or the recompute."""

    __slots__ = ("_enclosing", "_first", "_next", "_region")

    def __init__(self, region: _SavedRegion, first: bool, enclosing: Frame | None) -> None:
        self._region, self._first, self._enclosing = region, first, enclosing
        self._next = 0

    @property
    def recording(self) -> bool:
        """Whether the attention must run and call `record`; otherwise it calls `take` and must not run."""
        return self._first and (self._enclosing is None or self._enclosing.recording)

    @property
    def _offloads(self) -> bool:
        return self._region.offload or (self._enclosing is not None and self._enclosing._offloads)

    @property
    def kept_bytes(self) -> int:
        """The bytes of (out, lse) that the region holds now."""
        return sum(kept.bytes for kept in self._region.kept if kept is not None)

    def record(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Save the result of an attention that just ran: detached, in the same storage."""
        kept = HostKept(out, lse) if self._offloads else Kept(out, lse)
        COUNTERS.remat_bytes += kept.bytes
        frame: Frame | None = self
        while frame is not None:
            frame._region.kept.append(kept)
            frame = frame._enclosing

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (out, lse) of the recompute's next attention, and release it from the region.

        Raises:
            RematError: the region's results were taken before (a second backward), the recompute makes more calls than
                the first pass did, or a result was changed in place since.
        """
        if self._first and self._enclosing is not None:
            pair = self._enclosing.take()
            self._region.kept.append(Kept(*pair))
            return pair
        region, call = self._region, self._next
        if call >= len(region.kept):
            raise RematError(_MORE.format(recorded=len(region.kept)))
        kept, region.kept[call] = region.kept[call], None
        self._next += 1
        if kept is None:
            raise RematError(_TWICE.format(call=call))
        if kept.changed:
            raise RematError(_CHANGED.format(call=call))
        out, lse = kept.take()
        return out, lse

    def _close(self, failed: bool) -> None:
        """End the pass. PyTorch stops a recompute early by an exception, so failed may be true without an error."""
        region = self._region
        if self._first:
            if failed:
                region.kept.clear()
            for kept in region.kept:
                if kept is not None:
                    kept.settle()
            region.recorded = not failed
            return
        left = sum(kept is not None for kept in region.kept)
        region.drop()
        if left and not failed:
            raise RematError(_FEWER.format(recorded=len(region.kept), taken=self._next))


class _Pass:
    """Run passes of one kind through a region, as a context manager that may be entered again and nested."""

    __slots__ = ("_first", "_frames", "_region")

    def __init__(self, region: _SavedRegion, first: bool) -> None:
        self._region, self._first = region, first
        self._frames: list[Frame] = []

    def __enter__(self) -> None:
        if self._first:
            self._region.kept.clear()
        enclosing = ACTIVE.frame
        assert enclosing is None or isinstance(enclosing, Frame), "no other is set"
        frame = Frame(self._region, self._first, enclosing)
        self._frames.append(frame)
        ACTIVE.frame = frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame = self._frames.pop()
        ACTIVE.frame = frame._enclosing
        frame._close(failed=kind is not None)


def context_fn(offload: bool = False) -> Contexts:
    """Return the contexts of the first pass and the recompute, for `torch.utils.checkpoint.checkpoint`.

    Use: `checkpoint(fn, *args, use_reentrant=False, context_fn=remat.context_fn)`. torch.compile takes dispatch modes
    only, so a region that it traces gets the contexts of `selective_context_fn`.

    Args:
        offload: save (out, lse) in pinned host memory between the passes; use `partial(context_fn, offload=True)`.
            The region's input goes there too where `keeping_inputs_on_host` wraps the checkpoint function.

    Raises:
        UnsupportedError: offload in a region that torch.compile traces.
    """
    if _tracing():
        if offload:
            raise UnsupportedError(
                "offload in a region that torch.compile traces",
                "the compiler keeps attention's outputs there, and not this package",
                "offload=False, or regions that are not compiled",
            )
        return selective_context_fn()
    region = _SavedRegion(offload)
    return _Pass(region, first=True), _Pass(region, first=False)


def remat_checkpoint(
    fn: Callable[..., Any], *args: Any, checkpoint: Callable[..., Any] | None = None, offload: bool = False
) -> Any:
    """Run fn(*args) by a re-entrant checkpoint function; save only args and the (out, lse) of its attentions.

    Args:
        fn: the region; tensors that need a gradient must be among its positional arguments.
        checkpoint: called as checkpoint(run, *args). It must call `run` under no_grad first, and with gradients in the
            recompute. The re-entrant functions of Megatron-Core, Transformer Engine, DeepSpeed and PyTorch do so.
            Default: PyTorch's, with the RNG state preserved. Some frameworks do not checkpoint while they capture a
            CUDA graph: they call `run` once, with gradients. Attention then runs as if there were no region.
        offload: save args and (out, lse) in pinned host memory between the two passes.

    Returns:
        The result of `checkpoint`. With gradients disabled (evaluation) it is fn(*args), and nothing is saved.
    """
    if not torch.is_grad_enabled():
        return fn(*args)
    region = _SavedRegion(offload)
    plain_passes = 0

    def run(*inputs: Any) -> Any:
        nonlocal plain_passes
        if not torch.is_grad_enabled():
            with _Pass(region, first=True):
                return fn(*inputs)
        if region.recorded:
            with _Pass(region, first=False):
                return fn(*inputs)
        plain_passes += 1
        if plain_passes == 2:
            say_once(logger.warning, _NEVER_RECORDED)
        return fn(*inputs)

    checkpoint = checkpoint or partial(torch_checkpoint, use_reentrant=True)
    return (keeping_inputs_on_host(checkpoint) if offload else checkpoint)(run, *args)


def selective_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Tell PyTorch's selective activation checkpointing to save our attention's outputs and recompute the rest."""
    name: str = operator.name() if isinstance(operator, torch._ops.OpOverload) else ""
    return CheckpointPolicy.MUST_SAVE if name in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


def selective_context_fn() -> Contexts:
    """Return contexts like `context_fn`, made by selective checkpointing of the operator, for torch.compile.

    In eager mode prefer `context_fn`. A dispatch mode sees every operator of the region, which costs host time. It
    also fails if the recompute differs from the first pass, as where ZeRO-3 gathers parameters.
    """
    contexts: Contexts = create_selective_checkpoint_contexts(selective_policy)
    return contexts


def _tracing() -> bool:
    """Return whether Dynamo or AOTAutograd traces; AOTAutograd calls context_fn outside of Dynamo's frame."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


_NEVER_RECORDED = (
    "remat_checkpoint: the checkpoint function ran the region with gradients in its first pass, so attention runs "
    "again in the recompute. For a non-reentrant checkpoint use context_fn=dfa_megatron.remat.context_fn."
)
_MORE = (
    "The recompute of a checkpointed region asks for the result of another attention, but its first pass ran only "
    "{recorded}: the recompute took another path than the first pass. Make the region's control flow depend on its "
    "inputs alone (not on grad mode, step counters or unseeded randomness), and compile all of it or nothing."
)
_FEWER = (
    "The first pass of a checkpointed region ran {recorded} attentions, its recompute only {taken}: the recompute took "
    "another path than the first pass. Make the region's control flow depend on its inputs alone."
)
_TWICE = (
    "The result of attention {call} of a rematerialized region was taken before: a second backward through the region "
    "(retain_graph=True, or two backward calls that share it) is not possible, because the results are freed as the "
    "first one goes. Sum the losses and call backward once, or turn rematerialization off for this region."
)
_CHANGED = (
    "The result of attention {call} of a rematerialized region was changed in place after the first pass kept it, so "
    "the recompute cannot use it. Replace the in-place operation on attention's output (such as a dropout in place)."
)
