"""The cuDNN kernel: cuDNN's fused attention as PyTorch wraps it, for full and square causal blocks."""

from __future__ import annotations

import functools
import os

import torch

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.kernels import BlockCall, BlockKernel, Gradients, Need, Partial, Saved
from dfa_megatron.kernels.adapters.reference import ReferenceKernel
from dfa_megatron.kernels.adapters.shared import Operator, build_refusal, capability_text, dense, gpu_refusal
from dfa_megatron.kernels.merge import minus_delta
from dfa_megatron.plan.language.geometry import form_of

_INPUTS = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal", "scale")
_FORWARD = Operator(
    "aten::_scaled_dot_product_cudnn_attention", (*_INPUTS, "compute_log_sumexp", "return_debug_mask"), results=2
)
_BACKWARD = Operator(
    "aten::_scaled_dot_product_cudnn_attention_backward",
    (
        *_INPUTS, "grad_out", "out", "logsumexp",
        "philox_seed", "philox_offset", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
    ),
    results=3,
)  # fmt: skip
_OLDEST = 91501
"""cuDNN before 9.15.1 reads and writes out of bounds where a length is no multiple of 128 (pytorch issue 169849)."""


class CudnnKernel(BlockKernel):
    """bfloat16 and float16 on CUDA; grouped heads natively; gradients differ in the last bits from run to run.

    Everything is passed dense in (batch, length, heads, head_dim) order, since PyTorch keys its cache of compiled cuDNN
    graphs by the strides of q, k and v only (ATen/native/cudnn/MHA.cpp): an out, dout or lse laid out otherwise than at
    the graph's first use would be misread without an error. It is also one graph to compile per shape, not several.
    """

    name = "cudnn"
    backward_needs = "out"

    def refusal(self, need: Need) -> str | None:
        """See `BlockKernel.refusal`; the limits are those of PyTorch's own check for training (sdp_utils.cpp)."""
        if why := gpu_refusal(need):
            return why
        if "band" in need.forms:
            return "it has no sliding window through PyTorch: full and square causal blocks only"
        if need.deterministic or torch.get_deterministic_debug_mode() == 2:
            return "its backward is not deterministic: PyTorch does not ask cuDNN for the deterministic algorithm"
        if why := _head_dim_refusal(need):
            return why
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
            return "TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 makes PyTorch expect an lse in another layout; unset it"
        return build_refusal() or _version_refusal() or _FORWARD.refusal() or _BACKWARD.refusal()

    def replays(self, *, deterministic: bool) -> bool:
        """See `BlockKernel.replays`; determinism is a setting around its operator."""
        return not deterministic

    def launch(self, call: BlockCall) -> Partial:
        causal = _is_causal(call)
        if _is_vector(call):
            return _VECTOR_KERNEL.launch(call)
        results = _FORWARD(
            **_inputs(call), attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal,
            return_debug_mask=False, scale=call.softmax_scale,
        )  # fmt: skip
        out, lse = results[0], results[1]
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])

    def launch_backward(self, call: BlockCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        assert saved.out is not None, "the cudnn kernel reads out"
        causal = _is_causal(call)
        if call.deterministic:
            raise UnsupportedError("kernel='cudnn' with deterministic=True", "it is not deterministic", "kernel='aten'")
        if _is_vector(call):
            return _VECTOR_KERNEL.launch_backward(call, dout, Saved(saved.lse, minus_delta(dout, saved.out)))
        unused = torch.empty((), dtype=torch.int64, device=call.q.device)  # the dropout's random state
        lse = dense(saved.lse)
        dq, dk, dv = _BACKWARD(
            **_inputs(call),
            grad_out=dense(dout).transpose(1, 2),
            out=dense(saved.out).transpose(1, 2),
            logsumexp=lse.unsqueeze(-1) if _lse_dimensions() == 4 else lse,
            philox_seed=unused,
            philox_offset=unused,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=call.segments.q_len,
            max_k=call.segments.kv_len,
            dropout_p=0.0,
            is_causal=causal,
            scale=call.softmax_scale,
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


_VECTOR_KERNEL = ReferenceKernel()


def _head_dim_refusal(need: Need) -> str | None:
    dims, on_hopper = (need.head_dim, need.head_dim_v), need.capability == (9, 0)
    wide = on_hopper and dims[1] <= dims[0] <= 256
    if max(dims) <= 128 or wide or (dims == (192, 128) and need.capability in ((10, 0), (10, 3))):
        return None
    return (
        f"head_dim {dims[0]} and head_dim_v {dims[1]} are over 128 on compute capability {capability_text(need)} "
        "(9.0 takes a head_dim up to 256 that is not below head_dim_v; 10.0 and 10.3 take 192 and 128)"
    )


def _version_refusal() -> str | None:
    found: int | None = torch.backends.cudnn.version()
    if found is None:
        return f"PyTorch {torch.__version__} finds no cuDNN"
    if found < _OLDEST:
        major, minor, patch = found // 10000, found // 100 % 100, found % 100
        return f"cuDNN {major}.{minor}.{patch} is wrong for lengths not divisible by 128; 9.15.1 or newer is needed"
    return None


def _is_causal(call: BlockCall) -> bool:
    segments = call.segments
    form = form_of(segments.band, segments.q_len, segments.kv_len)
    if form == "band":
        size = f"{segments.q_len} x {segments.kv_len}"
        raise UnsupportedError(f"kernel='cudnn' with {segments.band} on {size}", "it has no window", "kernel='aten'")
    return form == "causal"


def _is_vector(call: BlockCall) -> bool:
    """One query or one key: cuDNN refuses a single key, and some versions a single query; the cost is linear anyway."""
    return min(call.segments.q_len, call.segments.kv_len) == 1


def _inputs(call: BlockCall) -> dict[str, torch.Tensor]:
    """Return q, k and v as the operators name them: (batch, heads, length, head_dim)."""
    return {
        "query": dense(call.q).transpose(1, 2),
        "key": dense(call.k).transpose(1, 2),
        "value": dense(call.v).transpose(1, 2),
    }


@functools.cache
def _lse_dimensions() -> int:
    """Ask the operator's meta function for the dimensions of lse: (batch, heads, q_len, 1) since 2.9, 3 before."""
    q = torch.empty(1, 1, 2, 8, dtype=torch.bfloat16, device="meta")
    results = _FORWARD(
        query=q, key=q, value=q, attn_bias=None, compute_log_sumexp=True,
        dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=1.0,
    )  # fmt: skip
    lse: torch.Tensor = results[1]
    return lse.dim()
