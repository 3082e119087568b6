"""Lightning attention (MiniMax-01) over ranks: its states decay by a number per head that does not depend on tokens.

Its layer computes all in its own forward, from zero. So that runs on each document's tokens of this rank, and what the
state adds to the first of them is added before the layer's norm: R = q times the decay since the rank's first token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.huggingface.recurrent.stand_ins import Keywords, Real, Sequence
from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.recurrence import Place, pass_states

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q, k and v (batch, tokens, heads, head_dim)."""


def lightning(real: Real, over: Sequence, given: Keywords) -> tuple[torch.Tensor, None]:
    """Compute a layer's forward, given as a function of itself and hidden_states (batch, local_seq, hidden)."""
    module = given["self"]

    def of_rows(row: Keywords, options: dict[str, Any]) -> torch.Tensor:
        hidden, others = row["hidden_states"], {name: x for name, x in row.items() if name != "self"}
        place = Place.of(hidden, 1, options["group"], options.get("cu_seqlens"), options["config"])
        pieces = list(pairwise(place.share.pieces))
        last: QKV | None = None
        outs = []
        for lo, hi in reversed(pieces):  # the first piece comes last: it needs the state of the others' last
            with _Piece(module, place if lo == 0 else None, last) as piece:
                outs.append(real(module, **others | {"hidden_states": hidden[:, lo:hi]})[0])
            last = last or piece.qkv
        return torch.cat(outs[::-1], 1)

    return torch.cat([of_rows(row, options) for row, options in over.rows(given, "hidden_states")]), None


class _Piece:
    """Watch a layer compute one piece: keep its q, k and v, and add what comes in to its output before the norm.

    place: of the piece that a state may come into, None for others.
    last: of the rank's last piece, None if that is this one.
    """

    def __init__(self, module: Any, place: Place | None, last: QKV | None) -> None:
        self.module, self.place, self.last = module, place, last
        self.qkv: QKV | None = None

    def __enter__(self) -> _Piece:
        norm, linear = self.module.norm, self.module.qkv_proj
        self.handles = [norm.register_forward_pre_hook(self._add), linear.register_forward_hook(self._keep)]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _keep(self, module: Any, args: Any, out: torch.Tensor) -> None:
        heads = self.module.act_fn(out).unflatten(2, (self.module.num_attention_heads, 3, -1))
        self.qkv = heads.unbind(3)

    def _add(self, module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor] | None:
        if self.place is None or not self.place.share.crosses:
            return None
        assert self.qkv is not None
        (out,), (q, _, _), (_, k, v) = args, self.qkv, self.last or self.qkv
        dtype = accumulator_dtype(q.dtype)
        slope = self.module.slope_rate.to(dtype).flatten()  # (heads,)
        with torch.autocast(out.device.type, enabled=False):
            local = torch.einsum("bthk,th,bthv->bhkv", k.to(dtype), _decays(slope, k.shape[1]).flip(0), v.to(dtype))
            m = torch.exp(-slope * q.shape[1])[None, :, None, None]
            state = pass_states(m, local, self.place, matrix=False)
            since = _decays(slope, q.shape[1]) * torch.exp(-slope)
            added = torch.einsum("bthk,th,bhkv->bthv", q.to(dtype), since, state)
        return (out + added.flatten(2).to(out.dtype),)


def _decays(slope: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return what is left of a state after 0, 1, ... tokens, (tokens, heads)."""
    after = torch.arange(tokens, device=slope.device, dtype=slope.dtype)
    return torch.exp(-after[:, None] * slope)
