"""Attention in float64 over all tokens at once, and over one block: what every plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HEAD_DIM = 3
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Reference:
    """Inputs, and the dense results for them: arrays of (tokens, HEAD_DIM), statistics of (tokens, 1)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def rows(self, name: str) -> np.ndarray:
        """The fields of a plan's name side by side."""
        fields = {
            "q": (self.q,), "kv": (self.k, self.v), "out": (self.out, self.lse), "dq": (self.dq,),
            "qdo": (self.q, self.dout, self.lse, self.delta), "dkv": (self.dk, self.dv),
        }  # fmt: skip
        return np.concatenate(fields[name], axis=1)


WIDTH = {
    "q": HEAD_DIM, "kv": 2 * HEAD_DIM, "out": HEAD_DIM + 1, "qdo": 2 * HEAD_DIM + 2, "dq": HEAD_DIM,
    "dkv": 2 * HEAD_DIM,
}  # fmt: skip


def forward(q: np.ndarray, kv: np.ndarray, sees: np.ndarray) -> np.ndarray:
    """(out, lse) side by side; a row that sees nothing has out 0 and lse -inf."""
    k, v = kv[:, :HEAD_DIM], kv[:, HEAD_DIM:]
    scores = np.where(sees, q @ k.T * SCALE, -np.inf)
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + top
    return np.concatenate([weights @ v / np.where(total == 0, 1.0, total), lse], axis=1)


def backward(qdo: np.ndarray, kv: np.ndarray, sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(dq, (dk, dv) side by side) of a block, given the lse of the whole rows."""
    q, dout, lse, delta = np.split(qdo, [HEAD_DIM, 2 * HEAD_DIM, 2 * HEAD_DIM + 1], axis=1)
    k, v = kv[:, :HEAD_DIM], kv[:, HEAD_DIM:]
    weights = np.where(sees, np.exp(np.where(sees, q @ k.T * SCALE - lse, -np.inf)), 0.0)
    dscores = weights * (dout @ v.T - delta) * SCALE
    return dscores @ k, np.concatenate([dscores.T @ q, weights.T @ dout], axis=1)


def merge(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Two (out, lse) of the same rows over different keys."""
    with np.errstate(invalid="ignore"):  # memory that was never written is NaN
        lse = np.logaddexp(a[:, -1:], b[:, -1:])
    finite = np.where(np.isfinite(lse), lse, 0.0)
    out = np.exp(a[:, -1:] - finite) * a[:, :-1] + np.exp(b[:, -1:] - finite) * b[:, :-1]
    return np.concatenate([out, lse], axis=1)


def reference(sees: np.ndarray, seed: int) -> Reference:
    """Random inputs and the dense results for a mask of (tokens, tokens)."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = rng.standard_normal((4, len(sees), HEAD_DIM))
    kv = np.concatenate([k, v], axis=1)
    result = forward(q, kv, sees)
    out, lse = result[:, :-1], result[:, -1:]
    delta = (dout * out).sum(axis=1, keepdims=True)
    dq, dkv = backward(np.concatenate([q, dout, lse, delta], axis=1), kv, sees)
    return Reference(q, k, v, dout, out, lse, delta, dq, dkv[:, :HEAD_DIM], dkv[:, HEAD_DIM:])
