"""Stand-ins for the operators of GPU kernels: they check and obey each argument, and compute on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dfa_megatron.doctor.dense import dense_attention

ARGUMENTS = {
    "aten": "query key value out grad_out logsumexp scale is_causal cum_seq_q cum_seq_k max_q max_k",
    "cudnn": "query key value out grad_out logsumexp scale is_causal cum_seq_q cum_seq_k max_q max_k",
    "flash4": "q k v out dout lse softmax_scale causal cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}
"""The operators' names of these, in one order."""
FIXED = {
    "aten": {"dropout_p": 0.0, "return_debug_mask": False},
    "cudnn": {"dropout_p": 0.0, "attn_bias": None, "compute_log_sumexp": True, "return_debug_mask": False},
    "flash4": {"softcap": 0.0, "return_lse": True, "deterministic": False},
}
"""Arguments that have one value in every call of these tests, where they are given."""


def readable(*tensors: torch.Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride % (16 // x.element_size()) == 0 for stride in x.stride()[:-1])


def gradients_of(q, k, v, dout, lse, delta, seen, scale) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
    """The gradient of a call from the global lse and delta, heads grouped."""
    group = q.shape[2] // k.shape[2]
    k64, v64 = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k64) * scale
    p = torch.exp(scores - lse.double().unsqueeze(-1)).masked_fill(~seen, 0.0)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout.double(), v64) - delta.unsqueeze(-1)) * scale
    dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q.double()), torch.einsum("bhij,bihd->bjhd", p, dout.double())
    dk, dv = (x.unflatten(2, (k.shape[2], group)).sum(3) for x in (dk, dv))
    return torch.einsum("bhij,bjhd->bihd", ds, k64).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dataclass
class StandIn:
    """The two operators of a kernel: they read their arguments as the vendor's source does, and compute in float64.

    lse_dimensions: of cuDNN's lse. graphs: cuDNN caches a graph by the strides of q, k and v only.
    """

    name: str
    lse_dimensions: int = 3

    def __post_init__(self) -> None:
        names = ["q", "k", "v", "out", "dout", "lse", "scale", "causal", "cu_q", "cu_k", "max_q", "max_k"]
        self.named = dict(zip(names, ARGUMENTS[self.name].split(), strict=True))
        self.graphs: dict[object, object] = {}
        self.launches: list[int] = []

    def seen(self, a: dict[str, Any], q_len: int, kv_len: int, max_k: int) -> torch.Tensor:
        """The pairs that the vendor's kernel computes for these bounds."""
        left, right = (a.get(f"window_size_{side}") for side in ("left", "right"))
        assert all(bound is None or bound >= 0 for bound in (left, right))
        if self.name == "aten":  # a bound of max_k or more is none; one side alone bounds the other by max_k
            left, right = (None if bound is None or bound >= max_k else bound for bound in (left, right))
            right = 0 if a[self.named["causal"]] else right
            if left is not None or right is not None:
                left, right = (max_k if bound is None else bound for bound in (left, right))
        right = 0 if a[self.named["causal"]] else right
        offset = 0 if self.name == "cudnn" else kv_len - q_len  # cuDNN's causal flag is aligned to the top left
        distance = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None] - offset
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        seen &= distance >= -left if left is not None else seen
        seen &= distance <= right if right is not None else seen
        if self.name == "flash4":
            assert seen.any(1).all(), "a row is blind"
            assert seen.any(0).all(), "a column is unseen: its gradient may stay unwritten"
        return seen

    def read(self, a: dict[str, Any]) -> dict[str, Any]:
        """The arguments by our names, checked; tensors are (batch, length, heads, head_dim)."""
        assert all(a[name] == value for name, value in FIXED[self.name].items() if name in a)
        x = {ours: a.get(theirs) for ours, theirs in self.named.items()}
        readable(*(x[name] for name in ("q", "k", "v", "out", "dout") if x[name] is not None))
        if x["lse"] is not None:
            assert x["lse"].is_contiguous()
            assert x["lse"].dtype == torch.float32
        if self.name == "cudnn":
            self.check_cudnn(x)
            x |= {name: x[name].transpose(1, 2) for name in ("q", "k", "v", "out", "dout") if x[name] is not None}
            if x["lse"] is not None:
                x["lse"] = x["lse"].reshape(x["lse"].shape[:3])
        return x

    def check_cudnn(self, x: dict[str, Any]) -> None:
        assert x["k"].shape[2] > 1
        if x["lse"] is not None:
            assert x["lse"].dim() == self.lse_dimensions
            key = tuple((x[name].shape, x[name].stride()) for name in ("q", "k", "v"))
            layout = tuple(x[name].stride() for name in ("out", "dout", "lse"))
            assert self.graphs.setdefault(key, layout) == layout, "a cached graph would misread these strides"

    def segments(self, a: dict[str, Any], x: dict[str, Any]) -> list[tuple[slice, slice, torch.Tensor]]:
        """(query rows, key rows, pairs) of each segment; packed tensors get a batch dimension."""
        if x["cu_q"] is None:
            q_len, kv_len = x["q"].shape[1], x["k"].shape[1]
            assert (x["max_q"], x["max_k"]) in ((q_len, kv_len), (None, None))
            return [(slice(0, q_len), slice(0, kv_len), self.seen(a, q_len, kv_len, kv_len))]
        x |= {name: x[name][None] for name in ("q", "k", "v", "out", "dout", "lse") if x[name] is not None}
        found = []
        assert x["cu_q"].dtype == x["cu_k"].dtype == torch.int32
        edges = [(int(q), int(k)) for q, k in zip(x["cu_q"], x["cu_k"], strict=True)]
        assert edges[-1] == (x["q"].shape[1], x["k"].shape[1])
        assert edges[0] == (0, 0) or (a.get("seqused_q") is not None and edges[0][1] == 0)
        self.launches.append(len(edges) - 1)
        least = 512 if self.name == "flash4" else 2  # shorter ones take another kernel, or a path with another lse
        used = a.get("seqused_q")
        for at, ((q0, k0), (q1, k1)) in enumerate(pairwise(edges)):
            q1 = q1 if used is None else q0 + int(used[at])
            assert edges[at + 1][0] >= q1 > q0
            assert k1 > k0
            assert x["max_q"] >= max(q1 - q0, least)
            assert x["max_k"] >= max(k1 - k0, least)
            found.append((slice(q0, q1), slice(k0, k1), self.seen(a, q1 - q0, k1 - k0, x["max_k"])))
        return found

    def forward(self, **a: Any) -> tuple[Any, ...]:
        x = self.read(a)
        outs, lses = [], []
        segments = self.segments(a, x)
        for rows, columns, seen in segments:
            tensors = x["q"][:, rows], x["k"][:, columns], x["v"][:, columns]
            out, lse = dense_attention(*tensors, visible=seen, softmax_scale=x["scale"])
            outs.append(out.to(x["q"].dtype))
            lses.append(lse.float().masked_fill(lse == -math.inf, math.inf))
        if (memory := a.get("out")) is not None:
            readable(memory)
            for (rows, *_), out, lse in zip(segments, outs, lses, strict=True):
                memory[rows], a["lse"][:, rows] = out[0], lse[0]
            return memory, a["lse"], None
        assert a.get("seqused_q") is None, "rows between segments would be returned without a value"
        out, lse = torch.cat(outs, 1), torch.cat(lses, 2)
        if x["cu_q"] is not None:
            return out[0], lse[0], None
        if self.name == "cudnn":
            return out.transpose(1, 2), lse.unsqueeze(-1) if self.lse_dimensions == 4 else lse
        return out, lse, None

    def backward(self, **a: Any) -> Any:
        x = self.read(a)
        segments, parts = self.segments(a, x), []
        delta = (x["dout"].double() * x["out"].double()).sum(-1).transpose(1, 2)
        if a.get("dlse") is not None:
            assert a["dlse"].is_contiguous()
            assert a["dlse"].dtype == torch.float32
            delta = delta - a["dlse"].double()
        for rows, columns, seen in segments:
            of_rows = x["q"][:, rows], x["k"][:, columns], x["v"][:, columns], x["dout"][:, rows]
            parts.append(gradients_of(*of_rows, x["lse"][:, :, rows], delta[:, :, rows], seen, x["scale"]))
        if x["cu_q"] is not None and a.get("dq") is not None:
            for (rows, *_), (dq, _, _) in zip(segments, parts, strict=True):
                a["dq"][rows] = dq[0]
            return [a["dq"], *(torch.cat(xs, 1)[0] for xs in [*zip(*parts, strict=True)][1:])]
        gradients = [torch.cat(xs, 1) for xs in zip(*parts, strict=True)]
        if x["cu_q"] is not None:
            return [g[0] for g in gradients]
        if self.name == "cudnn":
            return [g.transpose(1, 2) for g in gradients]
        for name, g in zip(("dq", "dk", "dv"), gradients, strict=True):
            if a.get(name) is not None:
                readable(a[name])
                a[name].copy_(g)
        return gradients
