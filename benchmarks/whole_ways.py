"""The attentions that whole_model compares: ours, an all-to-all, PyTorch's context parallelism and DeepSpeed's ALST."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.attention.baselines.ulysses import to_heads, to_sequence
from benchmarks.attention.method import zigzag
from dfa_megatron import TrainingConfig, shard_sequence
from dfa_megatron.doctor.world import World
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface import distribute_attention, local_attention
from dfa_megatron.huggingface.checkpointing import set_checkpointing
from dfa_megatron.runtime.comm.groups import channels

Tensor = torch.Tensor
LENGTHS: list[int] = []
"""Of the documents of a pack, for `whole`; none: a sequence is one document."""


def whole(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Attend causally to a whole sequence (batch, heads, seq, dim): flash-attn-4, or PyTorch's attention on a CPU."""
    if q.device.type == "cpu":
        parts = zip(*(x.split(LENGTHS or x.shape[2], dim=2) for x in (q, k, v)), strict=True)
        outs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
        return torch.cat(outs, dim=2).transpose(1, 2), None
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    if not LENGTHS:
        return flash_attn_func(q, k, v, causal=True)[0], None
    starts = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).to(q.device, torch.int32)
    longest = max(512, *LENGTHS)  # a pack of shorter ones would compile other kernels
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return flash_attn_varlen_func(q[0], k[0], v[0], **given, causal=True)[0][None], None


def exchanged(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Exchange tokens for heads, attend to whole sequences, and exchange them back."""
    q, k, v = (to_heads(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in (q, k, v))
    return to_sequence(whole(module, q, k, v, mask)[0].contiguous()), None


def context_parallel(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Call the attention that PyTorch's context has replaced, with cuDNN's kernel."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2), None


FUNCTIONS = {"ulysses": exchanged, "pytorch": context_parallel, "alst": whole}
"""By the way; transformers gets them under names of which it knows no masks, so that it makes none."""
WAYS = ("ours", *FUNCTIONS)


@contextlib.contextmanager
def attending(way: str, inner: Any, world: World, *, offload: bool) -> Iterator[None]:
    """Give a transformers model that attention inside, and its checkpointing; refuse what does not run here.

    offload: what checkpoints save goes to pinned host memory, of every way by the same copies beside the computation.
    """
    if way == "ours":
        distribute_attention(inner, config=TrainingConfig(checkpoint="remat", remat_offload=offload))
        yield
        dist.barrier()
        for over in channels():  # messages lie past PyTorch's allocator
            over.close()
        return
    if way == "pytorch" and not world.cuda:
        raise UnsupportedError("context_parallel on a CPU", "it splits PyTorch's CUDA attentions only", "GPUs")
    ALL_ATTENTION_FUNCTIONS[way] = FUNCTIONS[way]  # DeepSpeed wraps it
    with contextlib.ExitStack() as stack:
        stack.enter_context(local_attention(inner))
        set_checkpointing(inner, "full", offload=offload)
        inner.set_attn_implementation(way)
        try:
            if way == "alst":
                _register_alst(inner, world)
            if world.cuda and way != "pytorch":
                __import__("flash_attn.cute")
        except ImportError as error:
            raise UnsupportedError(way, str(error), "installing that package") from error
        if way == "pytorch":
            from torch.distributed.tensor.experimental import context_parallel as context

            unused = [torch.zeros(1, 2 * world.size, device=world.device)]  # it wants something to split
            stack.enter_context(context(init_device_mesh("cuda", (world.size,)), buffers=unused, buffer_seq_dims=[1]))
        yield


def _register_alst(inner: Any, world: World) -> None:
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if not world.cuda:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and serves inference
    deepspeed.init_distributed()
    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None  # made once
    UlyssesSPAttentionHF.register_with_transformers(
        inner, "alst", sequence_parallel_size=world.size, micro_batch_size=1
    )


def batch_for(way: str, ids: Tensor, world: World) -> dict[str, Tensor | None]:
    """Return what a rank passes: its next tokens as labels, and its tokens, but for ours, which takes all of them."""
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    if way == "ours":
        return {"ids": ids, "labels": shard_sequence(labels), "positions": None}
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    cut = (lambda x: zigzag(x, world)) if way == "pytorch" else shard_sequence  # PyTorch's own balance
    return {name: cut(x).contiguous() for name, x in (("ids", ids), ("labels", labels), ("positions", places))}
