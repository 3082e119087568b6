"""Attention and checkpointing of one DeepSpeed engine: ours, DeepSpeed's Ulysses, one rank's; and that they agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import safe_get_full_grad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.bench import relative
from benchmarks.deepspeed_common import batch_of, mean, most
from benchmarks.deepspeed_shapes import Method
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.config import TrainingConfig
from dfa_megatron.huggingface import distribute_attention, local_attention
from dfa_megatron.huggingface.checkpointing import set_checkpointing
from dfa_megatron.huggingface.distribute import transformers_model

LOSS_TOLERANCE, TOLERANCE = 0.002, 0.1
"""Of the loss, and of a gradient's distance from one rank's over its norm. Rounding to bfloat16 is about a hundredth
of the norm; with wrong tokens the distance is about the norm."""
COMPARED = (
    "embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight", "layers.0.mlp.down_proj.weight",
)  # fmt: skip
"""The parameters whose gradients are compared: all that follows them is in these."""


@contextlib.contextmanager
def attention(
    engine: Any, method: Method, *, kernel: str = "auto", schedule: str = "auto", sdpa: str = "cudnn"
) -> Iterator[None]:
    """Give the engine's model that attention and checkpointing inside; nothing else of it changes."""
    inner, mesh = transformers_model(engine.module), dfa_ds.mesh_of(engine)
    # The first name is the newer one.
    (getattr(inner, "activation_checkpointing_disable", None) or inner.gradient_checkpointing_disable)()
    if method.attention == "dfa":
        options = TrainingConfig(
            schedule=schedule,
            kernel=kernel,
            checkpoint=method.checkpoint,
            remat_offload=method.on_host,
        )
        distribute_attention(inner, group=mesh.group, config=options)
        yield
        return
    function = None
    if method.on_host and torch.cuda.is_available():
        checkpointing.configure(None, checkpoint_in_cpu=True)
        function = checkpointing.checkpoint
    set_checkpointing(inner, method.checkpoint, function=function)
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    inner.set_attn_implementation("sdpa")
    with local_attention(inner), _fast_sdpa(sdpa):
        try:
            if method.attention == "ulysses":
                # The groups of a process are made once; here for every case.
                parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
                UlyssesSPAttentionHF.register_with_transformers(
                    inner, core_attn_implementation="sdpa", sequence_parallel_size=mesh.size, micro_batch_size=1
                )
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = own


@contextlib.contextmanager
def _fast_sdpa(first: str) -> Iterator[None]:
    """PyTorch's attention with one of its fast kernels or an error, in the backward's recompute as well."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        yield
        return
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels if first == "cudnn" else kernels[::-1], set_priority=True):
        yield


def compare(engine: Any, methods: dict[str, Method], length: int, vocabulary: int, **choices: str) -> dict[str, Any]:
    """Compare loss and gradients of the methods with one rank's of the whole sequence, all with the same weights.

    Returns:
        By name, the relative differences "loss" and "gradients" (of the furthest of `COMPARED`), or
        "refused" with why.

    Raises:
        RuntimeError: one is further away than the tolerances; its figures would be of something else.
    """
    training, report = engine.module, {}
    before, training.tiles = training.tiles, 4
    want_loss, want = _gradients(engine, Method("local", "none"), batch_of(engine, length, vocabulary, "local"))
    for name, method in methods.items():
        try:
            loss, got = _gradients(engine, method, batch_of(engine, length, vocabulary, method.attention), **choices)
        except ValueError as error:  # Ulysses refuses a number of heads
            if method.attention != "ulysses" or "divisible" not in str(error):
                raise
            report[name] = {"refused": str(error).partition("\n")[0]}
            continue
        far = {key: relative(got[key], want[key]) for key in want}
        report[name] = {"loss": abs(loss - want_loss) / want_loss, "gradients": max(far.values())}
        near = report[name]["loss"] < LOSS_TOLERANCE and all(value < TOLERANCE for value in far.values())
        if most(not near):
            raise RuntimeError(f"{name} is not what one rank computes: {report[name]}, gradients {far}")
    training.tiles = before
    return report


@contextlib.contextmanager
def _weights_kept(engine: Any) -> Iterator[None]:
    """Steps within it change no weight: even small ones move the loss of a large model by more than methods differ."""
    groups = engine.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    try:
        for group in groups:
            group["lr"] = 0.0
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def _gradients(
    engine: Any, method: Method, batch: dict[str, Any], **choices: str
) -> tuple[float, dict[str, torch.Tensor]]:
    with attention(engine, method, **choices), _weights_kept(engine):
        loss = engine(**batch)
        engine.backward(loss)
        found = {}
        for name, parameter in engine.module.model.model.named_parameters():
            if name in COMPARED:
                found[name] = safe_get_full_grad(parameter).float()
        engine.step()
    return mean(loss), found
