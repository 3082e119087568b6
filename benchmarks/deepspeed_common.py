"""What the DeepSpeed benchmarks share: an engine at ZeRO-3, batches, its attentions, and that these agree."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from deepspeed.utils import safe_get_full_grad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.attention.baselines.deepspeed import register_ulysses
from benchmarks.attention.method import symmetric_bytes
from benchmarks.bench import relative, wait
from benchmarks.model_shapes import Method, Shape
from dfa_megatron import TrainingConfig, shard_sequence
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.doctor.world import own_device, slowest
from dfa_megatron.huggingface import distribute_attention, local_attention
from dfa_megatron.huggingface.checkpointing import set_checkpointing
from dfa_megatron.huggingface.distribute import transformers_model
from dfa_megatron.runtime.prepare import in_use

TILE = 2048
"""Rows of a tile; their logits with a vocabulary of 151,936 are 1.2 GiB in float32."""


ENOUGH = 20.0
"""Seconds of a step from which on it is taken once."""


LOSS_TOLERANCE, TOLERANCE = 0.002, 0.1
"""Of the loss, and of a gradient's distance from one rank's over its norm. Rounding to bfloat16 is about a hundredth
of the norm; with wrong tokens the distance is about the norm."""
COMPARED = (
    "embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight", "layers.0.mlp.down_proj.weight",
)  # fmt: skip
"""The parameters whose gradients are compared: all that follows them is in these."""


class Training(torch.nn.Module):
    """A causal language model that returns its loss, with logits and inner activations of an MLP tile by tile or not.

    tiled: "none", "loss" or "all", with ALST's tiles of MLPs. tiles: their number; None cuts rows into tiles of `TILE`.
    held_before: bytes of this GPU that were taken before the model was made.
    """

    def __init__(self, model: Any, tiled: str) -> None:
        super().__init__()
        self.model = model
        self.tiled = tiled
        self.tiles: int | None = None
        self.held_before = 0
        if tiled == "all":
            for layer in model.model.layers:
                layer.mlp.forward = functools.partial(self._mlp, layer.mlp, list(layer.mlp.parameters()))

    def _mlp(self, mlp: Any, parameters: list[torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
        whole: Any = type(mlp).forward
        result: torch.Tensor = TiledMLP.apply(whole, mlp, x, self._count(x), parameters)
        return result

    def _count(self, rows: torch.Tensor) -> int:
        return self.tiles or math.ceil(rows.shape[1] / TILE)

    def forward(self, labels: torch.Tensor, group: Any, **tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of a whole sequence; without a group that of this rank alone."""
        hidden = self.model.model(**tokens).last_hidden_state
        if group is None:
            return torch.nn.functional.cross_entropy(self.model.lm_head(hidden)[0, :-1].float(), labels[0, 1:])
        if self.tiled == "none":
            return dfa_ds.loss(self.model.lm_head(hidden), labels, group=group)
        tile = math.ceil(hidden.shape[:2].numel() / self._count(hidden))
        return dfa_ds.tiled_loss(self.model.lm_head, hidden, labels, group=group, tile=tile)


def optimizer(offload: bool, dry: bool) -> tuple[dict[str, Any], str]:
    """Return DeepSpeed's section for the optimizer, and which it is: its own on the CPU, else PyTorch's."""
    rate = {"lr": 1e-6}
    if not offload or dry:
        why = " on the CPU; a dry run compiles nothing" if offload else ""
        return {"type": "AdamW", "params": {**rate, "torch_adam": True}}, f"torch.optim.AdamW{why}"
    # torchrun gives a process one thread; libraries read this when they are loaded, which is later.
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return {"type": "AdamW", "params": rate}, "DeepSpeedCPUAdam"


def build(shape: Shape, longest: int, *, tiled: str, offload: bool, dry: bool) -> tuple[Any, str]:
    """Build a ZeRO-3 engine around a new `Training` in bfloat16; return it and its optimizer's name."""
    before = held()
    torch.manual_seed(0)
    with torch.device(own_device()):
        model = shape.model(longest)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    rotary = model.model.rotary_emb
    exact = rotary.inv_freq.clone()
    training = Training(model, tiled)
    training.held_before = before
    section, name = optimizer(offload, dry)
    host = {"offload_optimizer": {"device": "cpu", "pin_memory": not dry}} if offload else {}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": section,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, **host},
        "dist_flash_attention": {"enabled": True},
    }
    engine, *_ = dfa_ds.initialize(model=training, model_parameters=list(training.parameters()), config=settings)
    engine.train()
    rotary.inv_freq = exact.float()  # in bfloat16 positions of long sequences would be far from right
    return engine, name


def batch_of(engine: Any, length: int, attention: str) -> dict[str, Any]:
    """Return a random sequence as arguments for the engine, whole but for Ulysses, whose users cut it."""
    vocabulary, dice = engine.module.model.config.vocab_size, torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, length), generator=dice).to(engine.device)
    group, tokens = dfa_ds.mesh_of(engine).group, {"input_ids": ids}
    if attention == "ulysses":
        tokens["position_ids"] = torch.arange(length, device=ids.device)[None]
        tokens = {name: shard_sequence(x, group=group) for name, x in tokens.items()}
    return {**tokens, "labels": ids, "group": None if attention == "local" else group}


def synchronize() -> None:
    """Wait until all ranks have done their work."""
    wait()
    dist.barrier()


def take_step(engine: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Return the seconds of a whole training step on this rank, and the loss."""
    synchronize()
    begin = time.perf_counter()
    loss = engine(**batch)
    engine.backward(loss)
    engine.step()
    synchronize()
    return time.perf_counter() - begin, loss.detach()


def measure(engine: Any, method: Method, length: int, *, steps: int, warmup: int | None = None) -> dict[str, Any]:
    """Return rates, peak memory and the loss of whole training steps, the fastest of some.

    steps: one is enough if it takes longer than `ENOUGH`.
    warmup: tokens of the step before them, which makes what is made once; by default as many.
    """
    take_step(engine, batch_of(engine, warmup or length, method.attention))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    batch, times = batch_of(engine, length, method.attention), list[float]()
    while len(times) < steps and (not times or times[0] < ENOUGH):
        seconds, loss = take_step(engine, batch)
        times.append(most(seconds))
    value = mean(loss)
    return {
        "seconds_per_step": min(times),
        "times": times,
        "tokens_per_second": length / min(times),
        "tokens_per_second_per_gpu": length / min(times) / dist.get_world_size(),
        "peak_gib": peak_gib(engine, method.attention),
        "loss": value if math.isfinite(value) else str(value),
    }


def mean(loss: torch.Tensor) -> float:
    """Return the mean over all ranks."""
    value = loss.detach().float()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def most(value: float) -> float:
    """Return the largest of all ranks."""
    return slowest([value])[0]


def held() -> int:
    """Return the bytes of tensors on this rank's GPU now: DeepSpeed keeps destroyed ZeRO-3 engines alive."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def peak_gib(engine: Any, attention: str) -> float:
    """Return the peak memory of this engine's tensors on a GPU, the largest of all ranks; 0 without one.

    With our attention ("dfa") the symmetric memory is in it that our messages keep past PyTorch's allocator.
    """
    if not torch.cuda.is_available():
        return 0.0
    arenas = [symmetric_bytes(prepared) for prepared in in_use()] if attention == "dfa" else []
    return most((torch.cuda.max_memory_allocated() - engine.module.held_before + max(arenas, default=0)) / 2**30)


def made_with() -> dict[str, Any]:
    """Return what the figures were made with beside the machine."""
    return {"gpus": dist.get_world_size(), "zero_stage": 3, "cpu_threads": torch.get_num_threads()}


@contextlib.contextmanager
def attention(
    engine: Any, method: Method, *, kernel: str = "auto", schedule: str = "auto", sdpa: str = "cudnn"
) -> Iterator[None]:
    """Give the engine's model that attention and checkpointing inside; nothing else of it changes."""
    inner, mesh = transformers_model(engine.module), dfa_ds.mesh_of(engine)
    # The first name is the newer one.
    (getattr(inner, "activation_checkpointing_disable", None) or inner.gradient_checkpointing_disable)()
    if method.attention == "dfa":
        given: Any = {"checkpoint": method.checkpoint, "remat_offload": method.on_host}
        options = TrainingConfig(schedule=schedule, kernel=kernel, **given)
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
                register_ulysses(inner, "sdpa", mesh.size)
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


def compare(engine: Any, methods: dict[str, Method], length: int, **choices: str) -> dict[str, Any]:
    """Compare loss and gradients of the methods with one rank's of the whole sequence, all with the same weights.

    Returns:
        By name, the relative differences "loss" and "gradients" (of the furthest of `COMPARED`), or
        "refused" with why.

    Raises:
        RuntimeError: one is further away than the tolerances; its figures would be of something else.
    """
    training, report = engine.module, {}
    before, training.tiles = training.tiles, 4
    want_loss, want = _gradients(engine, Method("local", "none"), batch_of(engine, length, "local"))
    for name, method in methods.items():
        try:
            loss, got = _gradients(engine, method, batch_of(engine, length, method.attention), **choices)
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
