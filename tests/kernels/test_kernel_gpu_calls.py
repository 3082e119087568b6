"""How the GPU kernels call their operators, seen without a GPU: on the meta device, and through stand-ins."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from dfa_megatron.kernels.adapters import aten, cudnn, flash4
from dfa_megatron.kernels.adapters.aten import AtenFlashKernel
from dfa_megatron.kernels.adapters.cudnn import CudnnKernel
from dfa_megatron.kernels.adapters.flash2_flash3 import Flash2Kernel, Flash3Kernel
from dfa_megatron.kernels.adapters.flash4 import Flash4Kernel
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.api import BlockCall, BlockKernel, Saved
from dfa_megatron.kernels.segments import Segments
from dfa_megatron.plan.language.geometry import CAUSAL, FULL, Band, Segment
from dfa_megatron.testing.dense import assert_close, dense_attention
from tests.support.support_rows import kernel as of_kernel

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def gradients_of(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    seen: torch.Tensor, scale: float, dlse: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradient of a block from the global lse and out (and lse's), heads grouped, (batch, length, heads, dim)."""
    group = q.shape[2] // k.shape[2]
    dout64, q64, out64 = dout.double(), q.double(), out.double()
    k64, v64 = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q64, k64) * scale
    p = torch.exp(scores - lse.double().unsqueeze(-1)).masked_fill(~seen, 0.0)
    delta = (dout64 * out64).sum(-1).transpose(1, 2).unsqueeze(-1)
    if dlse is not None:
        delta = delta - dlse.double().unsqueeze(-1)
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout64, v64) - delta) * scale
    dq = torch.einsum("bhij,bjhd->bihd", ds, k64)
    dk, dv = torch.einsum("bhij,bihd->bjhd", ds, q64), torch.einsum("bhij,bihd->bjhd", p, dout64)
    dk, dv = (x.unflatten(2, (k.shape[2], group)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def readable(*tensors: torch.Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride % (16 // x.element_size()) == 0 for stride in x.stride()[:-1])


class Unpacked:
    """The calls of a packed operator, one per segment, as calls with a batch of one, and their results put together.

    q, k: the names of its queries and keys. cu_q, cu_k: of the offsets. rows: names that have a row per query.
    """

    def __init__(
        self, q: str, k: str, v: str, cu_q: str, cu_k: str, rows: tuple[str, ...], lse: tuple[str, ...]
    ) -> None:
        self.cu_q, self.cu_k = cu_q, cu_k
        self.by_row, self.by_column, self.by_last = (q, *rows), (k, v), lse

    def calls(self, a: dict[str, Any]) -> Iterator[dict[str, Any]]:
        q_edges, kv_edges = (a[name] for name in (self.cu_q, self.cu_k))
        assert q_edges.dtype == kv_edges.dtype == torch.int32
        assert q_edges[0] == kv_edges[0] == 0
        assert (q_edges[-1], kv_edges[-1]) == (len(a[self.by_row[0]]), len(a[self.by_column[0]]))
        for q0, q1, k0, k1 in zip(q_edges[:-1], q_edges[1:], kv_edges[:-1], kv_edges[1:], strict=True):
            assert q1 > q0
            assert k1 > k0
            part = dict(a)
            part |= {name: a[name][None, q0:q1] for name in self.by_row if name in a}
            part |= {name: a[name][None, k0:k1] for name in self.by_column}
            part |= {name: a[name][None, :, q0:q1].contiguous() for name in self.by_last if name in a}
            yield part | {self.cu_q: None, self.cu_k: None}

    @staticmethod
    def joined(results: list[tuple[Any, ...]], dims: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.cat([part[0] for part in parts], dim)
            for parts, dim in zip(zip(*results, strict=True), dims, strict=False)
        )


class FlashStandIn:
    """`_flash_attention_forward` and `_backward` as in flash_api.cpp: its bounds, its lse, what it never checks."""

    def seen(self, **a: Any) -> torch.Tensor:
        assert a["cum_seq_q"] is None
        assert a["cum_seq_k"] is None
        assert a["dropout_p"] == 0.0
        q_len, kv_len = a["query"].shape[1], a["key"].shape[1]
        if "packed" in a:
            assert a["max_q"] >= max(q_len, 2), "one row a segment takes another path"
            assert a["max_k"] >= kv_len
        else:
            assert (a["max_q"], a["max_k"]) == (q_len, kv_len)
        left, right = (-1 if a[name] is None else a[name] for name in ("window_size_left", "window_size_right"))
        left, right = (-1 if bound >= a["max_k"] else bound for bound in (left, right))
        if a["is_causal"]:
            right = 0
        if left < 0 and right < 0:
            return torch.ones(q_len, kv_len, dtype=torch.bool)
        # A side without a bound, beside one that has some, is bound by the longest kv_len.
        left, right = (a["max_k"] if bound < 0 else bound for bound in (left, right))
        distance = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None] - (kv_len - q_len)
        return (distance >= -left) & (distance <= right)

    packed = Unpacked("query", "key", "value", "cum_seq_q", "cum_seq_k", ("out", "grad_out"), ("logsumexp",))

    def forward(self, **a: Any) -> tuple[torch.Tensor, ...]:
        readable(a["query"], a["key"], a["value"])
        assert a["return_debug_mask"] is False
        if a["cum_seq_q"] is not None:
            return Unpacked.joined([self.forward(**part, packed=True) for part in self.packed.calls(a)], (0, 1))
        out, lse = dense_attention(a["query"], a["key"], a["value"], visible=self.seen(**a), softmax_scale=a["scale"])
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        return out.to(a["query"].dtype), lse.float(), torch.empty(0), torch.empty(0), torch.empty(0)

    def backward(self, **a: Any) -> Gradients:
        readable(a["query"], a["key"], a["value"])
        assert a["logsumexp"].is_contiguous()
        assert a["logsumexp"].dtype == torch.float32
        assert {"rng_state", "unused"} <= set(a)
        if a["cum_seq_q"] is not None:
            return Unpacked.joined([self.backward(**part, packed=True) for part in self.packed.calls(a)], (0, 0, 0))
        return gradients_of(
            a["grad_out"], a["query"], a["key"], a["value"], a["out"], a["logsumexp"], self.seen(**a), a["scale"]
        )


def flash2_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softmax_scale: float, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`flash_attn::_flash_attn_forward` of flash-attn 2.7.0 to 2.8.3."""
    readable(q, k, v)
    assert return_softmax is False
    seen = flash2_seen(q, k, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse = dense_attention(q, k, v, visible=seen, softmax_scale=softmax_scale)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return out.to(q.dtype), lse.float(), q.new_empty(0), torch.empty(2, dtype=torch.int64)


def flash2_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    softmax_lse: torch.Tensor, dq: torch.Tensor | None, dk: torch.Tensor | None, dv: torch.Tensor | None,
    dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool, rng_state: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`flash_attn::_flash_attn_backward` of flash-attn 2.7.0 to 2.8.3."""
    readable(dout, q, k, v, out)
    assert softmax_lse.is_contiguous()
    assert softmax_lse.dtype == torch.float32
    assert deterministic is False
    seen = flash2_seen(q, k, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    for into, gradient in zip(
        (dq, dk, dv), gradients_of(dout, q, k, v, out, softmax_lse, seen, softmax_scale), strict=True
    ):
        into.copy_(gradient)
    return torch.empty(0)


def flash2_seen(q, k, dropout_p, causal, left, right, softcap, alibi_slopes) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Its bounds are those of the copy in PyTorch."""
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    bounds = {"window_size_left": left, "window_size_right": right, "is_causal": causal}
    sizes = {"query": q, "key": k, "max_q": q.shape[1], "max_k": k.shape[1], "dropout_p": dropout_p}
    packed = {"cum_seq_q": None, "cum_seq_k": None}
    return FlashStandIn().seen(**bounds, **sizes, **packed)


FLASH3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FLASH3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""The operators of flash_attn_3 3.0.0 (up to 2.8.3 of flash-attention the backward returned dq, dk and dv first)."""


def by_name(schema: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Which argument each value is, since an implementation gets them in order, without trailing defaults."""
    names = [
        part.partition("=")[0].split()[-1] for part in schema[schema.index("(") + 1 :].split(") ->")[0].split(", ")
    ]
    defaults = {"is_causal": False, "window_size_left": -1, "window_size_right": -1, "deterministic": False}
    return defaults | dict(zip(names, arguments, strict=False))


def flash3_seen(a: dict[str, Any]) -> torch.Tensor:
    """Bounds as in hopper/flash_api.cpp, which drops those that cannot bind."""
    q_len, kv_len = a["q"].shape[1], a["k"].shape[1]
    left, right = a["window_size_left"], a["window_size_right"]
    left, right = -1 if left >= kv_len - 1 else left, -1 if right >= q_len - 1 else right
    right = 0 if a["is_causal"] else right
    distance = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None] - (kv_len - q_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    seen = seen & (distance >= -left) if left >= 0 else seen
    seen = seen & (distance <= right) if right >= 0 else seen
    assert seen.any(1).all(), "a row is blind"
    assert seen.any(0).all(), "a column is unseen: its gradient may stay unwritten"
    return seen


def flash3_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    a = by_name(FLASH3_FORWARD, arguments)
    readable(a["q"], a["k"], a["v"])
    assert a["num_splits"] == 1
    assert all(a[name] is None for name in ("k_new", "out", "cu_seqlens_q", "seqused_k", "page_table", "q_descale"))
    out, lse = dense_attention(a["q"], a["k"], a["v"], visible=flash3_seen(a), softmax_scale=a["softmax_scale"])
    return out.to(a["q"].dtype), lse.float(), a["q"].new_empty(0), a["q"].new_empty(0)


def flash3_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    a = by_name(FLASH3_BACKWARD, arguments)
    readable(a["dout"], a["q"], a["k"], a["v"], a["out"])
    assert a["softmax_lse"].is_contiguous()
    assert a["softmax_lse"].dtype == torch.float32
    assert a["deterministic"] is False
    rows = (a[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
    gradients = gradients_of(*rows, flash3_seen(a), a["softmax_scale"])
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        a[name].copy_(gradient)
    return tuple(torch.empty(0) for _ in range(5))


@pytest.fixture(scope="module")
def flash_packages() -> Iterator[None]:
    """Operators named and typed as those of flash-attn 2 and flash_attn_3, on CPU."""
    if importlib.util.find_spec("flash_attn") or importlib.util.find_spec("flash_attn_3"):
        pytest.skip("a real package is installed, whose operators have these names")
    libraries = [torch.library.Library(name, "FRAGMENT") for name in ("flash_attn", "flash_attn_3")]
    for name, function, changed in (
        ("_flash_attn_forward", flash2_forward, ()),
        ("_flash_attn_backward", flash2_backward, ("dq", "dk", "dv")),
    ):
        libraries[0].define(name + torch.library.infer_schema(function, mutates_args=changed))
        libraries[0].impl(name, function, "CPU")
    for schema, function in ((FLASH3_FORWARD, flash3_forward), (FLASH3_BACKWARD, flash3_backward)):
        libraries[1].define(schema)
        libraries[1].impl(schema.partition("(")[0], function, "CPU")
    yield
    for library in libraries:
        library._destroy()


class CudnnStandIn:
    """The cuDNN operators: (batch, heads, length, head_dim), and graphs cached by the strides of q, k and v only."""

    def __init__(self, lse_dimensions: int) -> None:
        self.lse_dimensions, self.graphs = lse_dimensions, {}

    def seen(self, **a: Any) -> torch.Tensor:
        assert a["attn_bias"] is None
        assert a["dropout_p"] == 0.0
        q_len, kv_len = a["query"].shape[2], a["key"].shape[2]
        assert kv_len > 1
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        return seen.tril() if a["is_causal"] else seen  # aligned to the top left

    def forward(self, **a: Any) -> tuple[Any, ...]:
        assert a["compute_log_sumexp"] is True
        readable(a["query"], a["key"], a["value"])
        q, k, v = (a[name].transpose(1, 2) for name in ("query", "key", "value"))
        out, lse = dense_attention(q, k, v, visible=self.seen(**a), softmax_scale=a["scale"])
        lse = lse.float().unsqueeze(-1) if self.lse_dimensions == 4 else lse.float()
        return out.to(a["query"].dtype).transpose(1, 2), lse, None, None, 0, 0, None, None, None

    def backward(self, **a: Any) -> Gradients:
        readable(a["query"], a["key"], a["value"])
        assert a["logsumexp"].dim() == self.lse_dimensions
        assert a["logsumexp"].is_contiguous()
        assert (a["max_q"], a["max_k"]) == (a["query"].shape[2], a["key"].shape[2])
        key = tuple((a[name].shape, a[name].stride()) for name in ("query", "key", "value"))
        layout = tuple(a[name].stride() for name in ("out", "grad_out", "logsumexp"))
        assert self.graphs.setdefault(key, layout) == layout, "a cached graph would misread these strides"
        lse = a["logsumexp"].reshape(a["logsumexp"].shape[:3])
        rows = (a[name].transpose(1, 2) for name in ("grad_out", "query", "key", "value", "out"))
        dq, dk, dv = gradients_of(*rows, lse, self.seen(**a), a["scale"])
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class Flash4StandIn:
    """`_flash_attn_fwd` and `_flash_attn_bwd` of flash_attn.cute.interface: their bounds, and None for none."""

    def seen(self, **a: Any) -> torch.Tensor:
        q_len, kv_len = a["q"].shape[1], a["k"].shape[1]
        left, right = a["window_size_left"], a["window_size_right"]
        assert all(bound is None or bound >= 0 for bound in (left, right))
        if a["causal"]:
            right = 0
        distance = torch.arange(kv_len)[None] - torch.arange(q_len)[:, None] - (kv_len - q_len)
        seen = torch.ones(q_len, kv_len, dtype=torch.bool)
        if left is not None:
            seen &= distance >= -left
        if right is not None:
            seen &= distance <= right
        assert seen.any(1).all(), "a row is blind"
        assert seen.any(0).all(), "a column is unseen: its gradient may stay unwritten"
        return seen

    packed = Unpacked("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", ("out", "dout"), ("lse", "dlse"))

    def forward(self, **a: Any) -> tuple[torch.Tensor | None, ...]:
        readable(a["q"], a["k"], a["v"])
        assert a["return_lse"] is True
        if a.get("cu_seqlens_q") is not None:
            assert min(a["max_seqlen_q"], a["max_seqlen_k"]) >= 512, "other kernels are compiled for short ones"
            return Unpacked.joined([self.forward(**part) for part in self.packed.calls(a)], (0, 1))
        out, lse = dense_attention(a["q"], a["k"], a["v"], visible=self.seen(**a), softmax_scale=a["softmax_scale"])
        return out.to(a["q"].dtype), lse.float(), None, None, None

    def backward(self, **a: Any) -> Gradients:
        readable(a["q"], a["k"], a["v"], a["out"], a["dout"])
        for name in ("lse", "dlse"):
            assert a[name].is_contiguous()
            assert a[name].dtype == torch.float32
        assert a["deterministic"] is False
        if a.get("cu_seqlens_q") is not None:
            return Unpacked.joined([self.backward(**part) for part in self.packed.calls(a)], (0, 0, 0))
        rows = (a[name] for name in ("dout", "q", "k", "v", "out", "lse"))
        gradients = gradients_of(*rows, self.seen(**a), a["softmax_scale"], a["dlse"])
        given = [a.get(name) for name in ("dq", "dk", "dv")]
        readable(*(x for x in given if x is not None))
        return tuple(g if x is None else x.copy_(g) for x, g in zip(given, gradients, strict=True))  # type: ignore[return-value]


@pytest.fixture(
    params=[
        "flash4",
        "flash4, some heads at a time",
        "flash3",
        "flash2",
        "aten",
        "cudnn, lse of 4 dimensions",
        "cudnn, lse of 3 dimensions",
    ]
)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockKernel:
    """A GPU kernel over a stand-in of its operators."""
    if request.param in ("flash2", "flash3"):
        request.getfixturevalue("flash_packages")
        kernel = Flash2Kernel() if request.param == "flash2" else Flash3Kernel()
        for name in ("flash_attn", "flash_attn_3", kernel.operators[0].package.module):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        return kernel
    if "flash4" in request.param:
        if "heads" in request.param:
            monkeypatch.setattr(flash4, "_ACCUMULATORS", 64)
        functions = Flash4StandIn().forward, Flash4StandIn().backward
        monkeypatch.setattr(flash4, "_functions", lambda: functions)
        return Flash4Kernel()
    if request.param == "aten":
        module, stand_in = aten, FlashStandIn()
        monkeypatch.setattr(aten, "_packs", lambda: True)
    else:
        module, stand_in = cudnn, CudnnStandIn(dimensions := 4 if "4" in request.param else 3)
        monkeypatch.setattr(cudnn, "_lse_dimensions", lambda: dimensions)
    monkeypatch.setattr(module, "_FORWARD", stand_in.forward)
    monkeypatch.setattr(module, "_BACKWARD", stand_in.backward)
    return AtenFlashKernel() if request.param == "aten" else CudnnKernel()


SIZES = [(24, 40), (40, 24), (24, 24), (1, 9), (9, 1), (1, 1), (90, 12), (90, 1)]
BANDS = [FULL, CAUSAL, Band(5, 2), Band(-1, 3), Band(7, -1), Band(-1, 85), Band(30, 85), Band(84, -1)]


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """The same values in memory of several orders, the last not aligned to 16 bytes."""
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return [x, x.transpose(0, 1).contiguous().transpose(0, 1), x.transpose(1, 2).contiguous().transpose(1, 2), shifted]


@pytest.mark.support("kernels", "calls to stand-ins for its operators", of_kernel)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gpu_kernels_give_their_operators_what_these_mean(
    kernel: BlockKernel, size: tuple[int, int], band: Band
) -> None:
    q_len, kv_len = size
    if kernel.name == "cudnn" and not band.is_full and not (band == CAUSAL and q_len == kv_len):
        pytest.skip("cudnn refuses bands")
    generator = torch.Generator().manual_seed(q_len * 100 + kv_len)

    def draw(length: int, heads: int) -> torch.Tensor:
        return torch.randn(2, length, heads, 16, generator=generator).bfloat16()

    q, k, v, dout = draw(q_len, 4), draw(kv_len, 2), draw(kv_len, 2), draw(q_len, 4)
    reference = ReferenceKernel()
    call = BlockCall.of(q, k, v, band, 0.3)
    want = reference.forward(call)
    delta = (dout.float() * want[0].float()).sum(-1).transpose(1, 2)
    want_gradients = reference.backward(call, dout, Saved(want[1], delta))
    for q_x, k_x, v_x, dout_x, out_x in zip(*(layouts(x) for x in (q, k, v, dout, want[0])), strict=True):
        call = BlockCall.of(q_x, k_x, v_x, band, 0.3)
        out, lse = kernel.forward(call)
        assert lse.shape == (2, 4, q_len)
        assert_close(out, want[0], tolerance=1e-4, name="out")
        assert_close(lse, want[1], tolerance=1e-6, name="lse")
        strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (want[1], delta)]
        saved = (
            Saved(strided[0], delta=strided[1]) if kernel.backward_needs == "delta" else Saved(strided[0], out=out_x)
        )
        got = kernel.backward(call, dout_x, saved)
        for name, g, w in zip(("dq", "dk", "dv"), got, want_gradients, strict=True):
            assert g.shape == w.shape
            error = (g.float() - w.float()).norm() / max(w.float().norm(), dout.float().norm())
            assert error < 2e-3, f"{name} is off by {error}"


PACKS = {
    "causal": [(5, 5, CAUSAL), (1, 1, FULL), (30, 30, CAUSAL), (2, 2, CAUSAL)],
    "full": [(5, 9, FULL), (7, 1, FULL), (1, 30, FULL)],
    "single tokens": [(1, 1, FULL)] * 5,
    "mixed": [(5, 5, CAUSAL), (4, 9, FULL), (12, 12, Band(3, 0)), (6, 6, CAUSAL)],
    "windows": [(12, 12, Band(3, 0)), (3, 3, CAUSAL), (40, 40, Band(3, 0))],
    "tall windows": [(90, 12, Band(11, 80)), (8, 4, FULL)],
    "tall windows without a right bound": [(90, 12, Band(3, -1)), (8, 8, Band(3, -1))],
}


@pytest.mark.support("kernels", "calls to stand-ins for its operators", of_kernel)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("pack", PACKS)
def test_gpu_kernels_give_their_packed_operators_what_segments_mean(kernel: BlockKernel, pack: str, gap: int) -> None:
    parts, q_len, kv_len = [], 0, 0
    for rows, columns, band in PACKS[pack]:
        tile = Segment(q_len, q_len + rows, kv_len, kv_len + columns, band).tile.shrink()
        assert tile is not None
        parts.append(Segment(tile.q.lo, tile.q.hi, tile.kv.lo, tile.kv.hi, tile.band))
        q_len, kv_len = q_len + rows + gap, kv_len + columns + gap
    if kernel.name == "cudnn" and (pack == "mixed" or "windows" in pack):
        pytest.skip("cudnn refuses bands")
    segments = Segments(tuple(parts), q_len, kv_len)
    generator = torch.Generator().manual_seed(q_len)
    q, dout = (torch.randn(1, q_len, 4, 16, generator=generator).bfloat16() for _ in range(2))
    k, v = (torch.randn(1, kv_len, 2, 16, generator=generator).bfloat16() for _ in range(2))
    call = BlockCall(q, k, v, segments, 0.3)
    reference = ReferenceKernel()
    want = reference.forward(call)
    delta = (dout.float() * want[0].float()).sum(-1).transpose(1, 2)
    known = Saved(want[1], delta)
    want_gradients = reference.backward(call, dout, known)
    got = kernel.forward(call)
    for name, g, w in zip(("out", "lse"), got, want, strict=True):
        assert g.shape == w.shape
        assert_close(g, w, tolerance=1e-4, name=name)
    saved = known if kernel.backward_needs == "delta" else Saved(want[1], out=want[0])
    gradients = kernel.backward(call, dout, saved)
    for name, g, w in zip(("dq", "dk", "dv"), gradients, want_gradients, strict=True):
        assert g.shape == w.shape
        error = (g.float() - w.float()).norm() / max(w.float().norm(), dout.float().norm())
        assert error < 2e-3, f"{name} is off by {error}"


def test_packed_kernels_are_called_once_for_equal_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def forward(**a: Any) -> tuple[torch.Tensor | None, ...]:
        calls.append(len(a["cu_seqlens_q"]) - 1)
        return Flash4StandIn().forward(**a)

    monkeypatch.setattr(flash4, "_functions", lambda: (forward, None))
    parts = [Segment(lo, hi, lo, hi, CAUSAL if hi - lo > 1 else FULL) for lo, hi in pairwise((0, 4, 5, 6, 20, 64))]
    q = torch.randn(1, 64, 2, 16).bfloat16()
    Flash4Kernel().forward(BlockCall(q, q, q, Segments(tuple(parts), 64, 64), 0.3))
    assert calls == [5]


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "passes"),
    [
        (8192, 32, 32, 1),
        (32768, 32, 32, 1),
        (32768, 32, 8, 1),
        (65536, 32, 32, 2),
        (65536, 33, 33, 1),
        (65536, 32, 8, 2),
        (131072, 32, 8, 4),
        (131072, 32, 1, 1),
    ],
)
def test_flash4s_backward_takes_some_heads_at_a_time_where_its_accumulators_are_large(
    rows: int, heads: int, kv_heads: int, passes: int
) -> None:
    q, k = (torch.empty(1, rows, count, 128, device="meta") for count in (heads, kv_heads))
    assert flash4._passes(q, k) == passes


@pytest.mark.parametrize("kernel_class", [AtenFlashKernel, CudnnKernel])
@pytest.mark.parametrize("band", [FULL, CAUSAL])
def test_the_real_operators_take_the_call(kernel_class: type[BlockKernel], band: Band) -> None:
    """On the meta device: names, types and shapes of arguments and results, in the PyTorch at hand."""
    q, k = (torch.empty(2, 32, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    call = BlockCall.of(q, k, k, band, 0.1)
    out, lse = kernel_class().forward(call)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 32)
    assert lse.dtype == torch.float32
    saved = Saved(lse=lse, out=out)
    gradients = kernel_class().backward(call, q, saved)
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_the_real_operator_takes_a_packed_call() -> None:
    """On the meta device, as above, for FlashAttention-2 in PyTorch."""
    q, k = (torch.empty(1, 48, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    segments = Segments((Segment(0, 20, 0, 20, CAUSAL), Segment(20, 48, 20, 48, CAUSAL)), 48, 48)
    call = BlockCall(q, k, k, segments, 0.1)
    out, lse = AtenFlashKernel().forward(call)
    assert out.shape == q.shape
    assert lse.shape == (1, 4, 48)
    gradients = AtenFlashKernel().backward(call, q, Saved(lse=lse, out=out))
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]


def test_an_operator_that_pads_its_lse_is_called_for_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = FlashStandIn()
    monkeypatch.setattr(aten, "_FORWARD", stand_in.forward)
    monkeypatch.setattr(aten, "_BACKWARD", stand_in.backward)
    monkeypatch.setattr(aten, "_packs", lambda: False)
    monkeypatch.setattr(FlashStandIn, "packed", None)
    segments = Segments((Segment(0, 20, 0, 20, CAUSAL), Segment(20, 48, 20, 48, CAUSAL)), 48, 48)
    q = torch.randn(1, 48, 2, 16).bfloat16()
    call = BlockCall(q, q, q, segments, 0.3)
    out, lse = AtenFlashKernel().forward(call)
    assert_close(out, ReferenceKernel().forward(call)[0], tolerance=1e-4)
    gradients = AtenFlashKernel().backward(call, q, Saved(lse, out=out))
    assert [g.shape for g in gradients] == [q.shape] * 3
