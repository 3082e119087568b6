"""A cache of transformers whose keys stay on the rank that computed them, and whose states are on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.generation.holdings import Progress, Sight
from dfa_megatron.kernels.api import accumulator_dtype

_ROOM = 16
"""Slots for new tokens that a layer has beyond a sixteenth of those that it holds."""


class ShardedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Hold this rank's keys and values of a layer, (batch, slots, kv_heads, head_dim) with room behind them."""

    def __init__(self, progress: Progress, sight: Sight) -> None:
        super().__init__()
        self.progress, self.sight = progress, sight
        self.is_sliding, self._lo, self._hi = sight.size is not None, 0, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note the dtype and the device; memory is taken by `update`."""
        self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep new keys and values (batch, kv_heads, tokens, head_dim), and return what attention is computed over.

        In the prefill these are this rank's part; later they are the same on every rank, one keeps them, and each gets
        all that it holds.
        """
        new = [x.transpose(1, 2) for x in (key_states, value_states)]
        held = self.progress.held(self.sight)
        if not self.progress.before:
            self.lazy_initialization(key_states, value_states)
            self._keep([x[:, x.shape[1] - held :] for x in new])
            return key_states, value_states
        self._lo = self._hi + self.progress.takes - held
        if self.progress.takes:
            if self._hi == self.keys.shape[1]:
                self._keep([x[:, self._lo :] for x in (self.keys, self.values)])
            for x, one in zip((self.keys, self.values), new, strict=True):
                x[:, self._hi : self._hi + 1] = one
            self._hi += 1
        keys, values = (x[:, self._lo : self._hi].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values

    def _keep(self, held: list[torch.Tensor]) -> None:
        """Copy keys and values into memory with room behind them."""
        self._lo, self._hi = 0, held[0].shape[1]
        rooms = [x.new_empty(x.shape[0], x.shape[1] // 16 + _ROOM, *x.shape[2:]) for x in held]
        self.keys, self.values = (torch.cat(both, 1) for both in zip(held, rooms, strict=True))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the keys of a mask and the first of them; no mask is made."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens of a row before this forward, padding among them."""
        return max(self.progress.before - self.progress.added, 0)

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1


class ShardedStates(LinearAttentionLayer):  # type: ignore[misc]
    """Hold the states of a recurrent layer after the last token, the same on every rank."""

    def __init__(self, progress: Progress, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.progress = progress

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last inputs (batch, channels, tokens) of a convolution; in the prefill, from the ranks with them."""
        progress, width = self.progress, conv_kernel_size or conv_states.shape[-1]
        if progress.before:
            whole: torch.Tensor = super().update_conv_state(conv_states, state_idx, width, **kwargs)
            return whole
        tail = conv_states[..., -min(width, progress.local) :]
        last = torch.cat(progress.gather(tail), -1)[..., -width:].contiguous()
        for row, start in enumerate(progress.starts):
            last[row, :, : max(0, last.shape[-1] - (progress.total - start))] = 0
        super().update_conv_state(last, state_idx, width, **kwargs)
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keep a state; in the prefill, that of the last rank, whose tokens end the sequence."""
        if not self.progress.before:
            wide = recurrent_states.to(accumulator_dtype(recurrent_states.dtype))  # as it is where a state came in
            recurrent_states = self.progress.gather(wide)[-1]
        kept: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return kept


class ShardedBoth(ShardedStates, ShardedLayer):
    """Hold the keys and the states of a layer that has both."""

    is_compileable = False

    def __init__(self, progress: Progress, sight: Sight, number_of_states: int = 1) -> None:
        ShardedLayer.__init__(self, progress, sight)
        ShardedStates.__init__(self, progress, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Take memory for keys, which come by position, or for states."""
        (ShardedLayer if len(args) == 2 else ShardedStates).lazy_initialization(self, *args, **kwargs)


class ShardedCache(Cache):  # type: ignore[misc]
    """Hold the keys of a generation over a group; `model.generate` of a distributed model makes one.

    Attributes:
        spans_ranks: that it is one.
        progress: what the ranks hold.
        sights: for which layers keep keys.
    """

    spans_ranks = True

    def __init__(
        self, config: Any, rank: int, ranks: int, gather: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> None:
        """Make an empty cache for a model of that configuration.

        Raises:
            UnsupportedError: a layer caches something else than keys and values, or states.
        """
        self.progress = Progress(rank, ranks, gather)
        types = getattr(config, "layer_types", None) or ()
        made = [
            self._layer(layer, chunked=types[at : at + 1] == ["chunked_attention"])
            for at, layer in enumerate(DynamicCache(config=config).layers)
        ]
        self.sights = {layer.sight for layer in made if isinstance(layer, ShardedLayer)}
        super().__init__(layers=made)

    def _layer(self, theirs: Any, *, chunked: bool) -> Any:
        kind, sight = type(theirs).__name__, Sight(getattr(theirs, "sliding_window", None), chunked)
        if kind == "DummyLayer":
            return theirs
        if kind == "LinearAttentionLayer":
            return ShardedStates(self.progress, theirs.number_of_states)
        if kind in ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"):
            return ShardedBoth(self.progress, sight, theirs.number_of_states)
        if kind in ("DynamicLayer", "DynamicSlidingWindowLayer"):
            return ShardedLayer(self.progress, sight)
        raise UnsupportedError(
            f"generation with a cache layer of type {kind}",
            "it holds something else than keys and values, or states",
            "with dfa_megatron.huggingface.local_attention(model)",
        )

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank's keys and values, with their room."""
        held = [layer for layer in self.layers if isinstance(layer, ShardedLayer) and layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in held)

    def prefill(self, starts: list[int], total: int, added: int) -> None:
        """Begin a sequence of `total` tokens, `added` of them in front of each row's own, which begin at `starts`."""
        self.progress.starts, self.progress.total, self.progress.added = tuple(starts), total, added
        self.progress.local = total // self.progress.ranks

    def step(self) -> None:
        """Begin a forward of one token."""
        self.progress.before = self.progress.total
        self.progress.total += 1
