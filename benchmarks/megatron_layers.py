"""Times Megatron-Core layers, and training steps of a Llama-shaped model, with distributed attention; writes JSON.

    torchrun --nproc-per-node 4 -m benchmarks.megatron_layers --out megatron.json
    torchrun --nproc-per-node 4 -m benchmarks.megatron_layers --layers 131072:8:14336 --train --out x.json
    torchrun --nproc-per-node 2 -m benchmarks.megatron_layers --toy --out toy.json     # on CPU, to see that it runs

Layers alone (`--layers LENGTH:KV_HEADS:FFN ...`, or `LENGTH:SHAPE`: 7b, gqa, 33h, 16h, 8h, 4h or 2h of the paper,
33h-as-34 and 33h-as-40 with the heads that 2 and 8 tensor-parallel GPUs pad to, or qwen3-next, whose gated delta nets
Megatron spreads by all-to-all): forward and backward of `--depth` layers, without embedding, head and optimizer, in
several modes:

    remat           ours; attention's output and lse are kept, the rest is recomputed
    remat-offload   the same, kept in pinned host memory
    remat-boundary  as remat, on Megatron's zigzag batches, whose ids travel to their place (training alone)
    full            ours with Megatron's full recomputation: attention runs twice
    none            ours without recomputation
    remat-te        as remat, among Transformer Engine's modules; -fp8: with its linear layers in 8 bits
    te, te-full     Transformer Engine's attention over a ring, without and with full recomputation
    tp-te-full      all GPUs share weights and heads (tensor and sequence parallelism); full recomputation
    tp-full         the same with Megatron's unfused attention, which runs without Transformer Engine

Modes that need nothing of ours come first, so that our memory does not count in their peaks. What a mode cannot do is
written with its reason. Each mode's attention is compared with float64 first, and a mode that is wrong is not timed.

Training (`--train LENGTH:LAYERS:STEPS:MODE ...`), in the same modes: GPTModel, DDP, the distributed optimizer and
random tokens; what does not fit is said so, and the next case goes on. Without either flag both run, each with a set
of its own. CUDA_DEVICE_MAX_CONNECTIONS is 1, as Megatron demands on Hopper, unless it is set.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.attention.correctness import exact_of, too_far
from benchmarks.attention.failures import attempt
from benchmarks.bench import benchmark, clear_memory, flags_of, median_ms, peak_gib, relative
from benchmarks.megatron_common import (
    MODES,
    NAMED,
    Mode,
    Shape,
    arrange,
    gpt_model,
    make_config,
    make_spec,
    refusal,
    seed,
)
from benchmarks.programs import draw
from dfa_megatron import MegatronConfig, shard_sequence
from dfa_megatron.doctor.world import World, mark, seconds_between, slowest
from dfa_megatron.flags import flag
from dfa_megatron.plan.language.geometry import CAUSAL

LAYERS = ("65536:8:14336", "131072:8:14336", "131072:32:11008")
TRAINING = (
    "32768:8:30:remat", "32768:8:8:full",
    *(f"131072:4:5:{mode}" for mode in ("remat", "remat-boundary", "full", "none", "te-full", "te")),
    "262144:4:4:remat", "524288:2:2:remat", "1048576:2:1:remat",
)  # fmt: skip
TOY_TRAINING = ("48:2:3:remat", "48:2:2:full")
CHECKED = 256
"""Tokens of each rank in the comparison with float64."""
LAYER_MODES = ("remat", "full", "none", "te", "te-full", "remat-te", "remat-te-fp8")


TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Of the norm of the difference to the norm of what is right."""


@dataclass(frozen=True)
class Job:
    """The cases, and how they run."""

    layers: tuple[str, ...] = flag((), "cases", metavar="LENGTH:KV_HEADS:FFN|LENGTH:SHAPE")
    train: tuple[str, ...] = flag((), "cases", metavar="LENGTH:LAYERS:STEPS:MODE")
    modes: tuple[str, ...] = flag(LAYER_MODES, "of the layers", choices=tuple(MODES))
    hidden_size: int = flag(4096, "of layers without a name")
    heads: int = flag(32, "of them")
    kv_heads: int = flag(8, "of the trained model")
    ffn_hidden_size: int = flag(14336, "of the trained model")
    vocab_size: int = flag(128256, "of the trained model")
    tensor_model_parallel_size: int = flag(1, "of the modes that share sequences")
    kernel: str = flag("auto", "of ours")
    schedule: str = flag("auto", "of ours")
    depth: int = flag(4, "layers that are timed together")
    warmup: int = flag(2, "calls that are not timed")
    repeats: int = flag(5, "calls that are")
    fusion: bool = flag(True, "compile SwiGLU")
    toy: bool = flag(False, "sizes that a CPU can do")
    out: Path = flag(Path("megatron.json"), "the figures, as JSON")

    def blocks(self) -> list[tuple[int, Shape]]:
        """Return the length and the layers of each case; --toy makes a named shape narrow."""
        return [self._block(*case.split(":")) for case in self.layers]

    def _block(self, length: str, *rest: str) -> tuple[int, Shape]:
        if len(rest) == 2:
            return int(length), Shape(self.hidden_size, self.heads, int(rest[0]), int(rest[1]))
        shape = NAMED[rest[0]]
        toy = replace(shape, hidden_size=8 * shape.heads, ffn=self.ffn_hidden_size, width=16 if shape.width else 0)
        return int(length), toy if self.toy else shape


def flags(argv: Sequence[str] | None) -> Job:
    """Return the command line; --toy stands for sizes that a CPU can do."""
    job = flags_of(Job, __doc__, argv)
    if job.toy:
        job = replace(job, hidden_size=32, heads=4, kv_heads=2, ffn_hidden_size=48, vocab_size=64, warmup=1, repeats=2)
    if job.layers or job.train:
        return job
    return replace(job, layers=("48:2:48",) if job.toy else LAYERS, train=TOY_TRAINING if job.toy else TRAINING)


def main(argv: Sequence[str] | None = None) -> None:
    """Run as one rank."""
    job = flags(argv)
    with benchmark(job, 120.0, layers=[], training=[]) as (world, report):
        for phase in PHASES:
            for length, shape in job.blocks():
                for mode in (MODES[name] for name in job.modes if phase(MODES[name])):
                    run = partial(time_layers, job, shape, mode, length, world.device)
                    case = {"mode": mode.name, "length": length, **asdict(shape)}
                    report.add(case | tried(job, mode, shape, world, run), "layers")
        shape = Shape(job.hidden_size, job.heads, job.kv_heads, job.ffn_hidden_size)
        for one in job.train:
            length, depth, steps = map(int, one.split(":")[:3])
            mode = MODES[one.rpartition(":")[2]]
            run = partial(train, job, shape, mode, length, depth, steps, world.device)
            case = {"mode": mode.name, "length": length, "num_layers": depth, **asdict(shape)}
            report.add(case | tried(job, mode, shape, world, run), "training")


PHASES: tuple[Callable[[Mode], bool], ...] = (
    lambda mode: mode.tensor,
    lambda mode: not mode.tensor and mode.checkpoint is None,
    lambda mode: mode.checkpoint is not None,
)
"""Kinds of modes, in the order in which they run."""


def tried(job: Job, mode: Mode, shape: Shape, world: World, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a case's figures, or why there are none."""
    if why := refusal(mode, shape, world.size):
        return {"cannot": why}
    arrange(world.size if mode.tensor else job.tensor_model_parallel_size)
    seed()
    return attempt(world, run)


def time_layers(job: Job, shape: Shape, mode: Mode, length: int, device: torch.device) -> dict[str, Any]:
    """Return milliseconds per layer, both passes, and the peak memory in GiB with weights and gradients.

    Where the attention is not that of float64, return what is wrong.
    """
    block, table = build_layers(job, shape, mode, length, device)
    errors = attention_errors(block, shape, mode, CHECKED * dist.get_world_size())
    if why := too_far(errors, TOLERANCE[block.config.params_dtype]):
        return {"wrong": why}
    rows = length // dist.get_world_size()  # under sequence parallelism tensor-parallel ranks share a part's rows
    hidden = torch.randn(rows, 1, shape.hidden_size, device=device, dtype=block.config.params_dtype)
    gradient = torch.randn_like(hidden)

    def step() -> None:
        for parameter in block.parameters():
            parameter.grad = None
        block(hidden.requires_grad_(), None, rotary_pos_emb=table).backward(gradient)
        hidden.grad = None

    block.train()
    clear_memory()
    elapsed = median_ms(step, device, warmup=job.warmup, repeats=job.repeats) / job.depth
    useful = 3 * shape.layer_flop(length) / dist.get_world_size()
    rate = {} if shape.hybrid else {"tflops_per_gpu": round(useful / elapsed / 1e9, 1)}
    error = float(f"{max(errors.values()):.2e}")
    return {"ms_per_layer": round(elapsed, 3), **rate, "peak_gib": round(peak_gib(), 2), "attention_error": error}


def build_layers(job: Job, shape: Shape, mode: Mode, length: int, device: torch.device) -> Any:
    """Return Megatron's block of layers, and the table of its rotary positions."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_block import TransformerBlock

    from dfa_megatron.megatron import declare_batch_layout

    group = parallel_state.get_context_parallel_group()
    config = make_config(shape, job.depth, mode, fusion=job.fusion)
    options = mode.options(job.kernel, job.schedule)
    declare_batch_layout(group, "contiguous" if options is not None and mode.layout == "contiguous" else "zigzag")
    block = TransformerBlock(
        config,
        make_spec(config, mode, options),
        post_layer_norm=False,
        post_process=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).to(device, config.params_dtype)
    rotary = RotaryEmbedding(shape.head_dim, 1.0, rotary_base=500000, use_cpu_initialization=True, cp_group=group)
    return block, rotary.to(device)(length, packed_seq=options is not None)  # distributed layers take the whole table


def attention_errors(block: Any, shape: Shape, mode: Mode, tokens: int) -> dict[str, float]:
    """Return the relative errors of out, dq, dk and dv of the block's last attention: each is the largest of all ranks.

    tokens: of a short sequence. A layer that has no core attention, such as a gated delta net, is passed over.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.enums import AttnMaskType

    found = [getattr(layer.self_attention, "core_attention", None) for layer in block.layers]
    core = [attention for attention in found if attention is not None][-1]
    device = next(block.parameters()).device
    where = {"device": device, "dtype": block.config.params_dtype}
    whole = draw(tokens, shape.heads, shape.groups, shape.head_dim, 3, **where)

    def own(x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part (tokens, 1, heads, head_dim)."""
        if mode.tensor:
            return x[0].chunk(dist.get_world_size(), 1)[parallel_state.get_tensor_model_parallel_rank()][:, None]
        group = parallel_state.get_context_parallel_group()
        layout = "zigzag" if mode.checkpoint is None else "contiguous"
        return shard_sequence(x[0], group=group, layout=layout, dim=0)[:, None]

    leaves = [own(x).clone(memory_format=torch.contiguous_format).requires_grad_() for x in whole[:3]]
    with torch.enable_grad():
        out = core(*leaves, None, attn_mask_type=AttnMaskType.causal)
    gradients = torch.autograd.grad(out, leaves, own(whole[3]).flatten(2))
    got = [out.unflatten(2, (-1, shape.head_dim)), *gradients]
    errors = [relative(x, own(y)) for x, y in zip(got, exact_of(whole, CAUSAL), strict=True)]
    return dict(zip(("out", "dq", "dk", "dv"), slowest(errors), strict=True))


def train(
    job: Job, shape: Shape, mode: Mode, length: int, layers: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """Return tokens and model TFLOP per second and GPU, peak memory and the loss, of `steps` steps after two."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    options = mode.options(job.kernel, job.schedule)
    config = make_config(shape, layers, mode, fusion=job.fusion)
    model, optimizer = build(config, make_spec(config, mode, options), job.vocab_size, length)
    clear_memory()
    times, losses = [], []
    for step in range(2 + steps):
        before = mark(device)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(job.vocab_size, length, step, options, device),
            model=model,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        times.append(1e3 * seconds_between(before, mark(device)))
        losses.append(reduced[0]["loss"])
    elapsed = slowest([statistics.median(times[2:])])[0]
    embedding = shape.hidden_size * job.vocab_size
    useful = 3 * (layers * shape.layer_flop(length) + 2.0 * embedding * length)
    ranks = dist.get_world_size()
    return {
        "parameters": layers * shape.layer_parameters + 2 * embedding,
        "steps": steps,
        "ms_per_step": round(elapsed, 2),
        "tokens_per_second_per_gpu": round(length / elapsed * 1e3 / ranks, 1),
        "tflops_per_gpu": round(useful / elapsed / 1e9 / ranks, 1),
        "peak_gib": round(peak_gib(), 2),
        "first_loss": mean_loss(losses[0]),
        "last_loss": mean_loss(losses[-1]),
    }


def build(config: Any, spec: Any, vocabulary: int, length: int, *, lr: float = 1e-4) -> tuple[Any, Any]:
    """Return the model in DDP, and Adam, whose state is spread over the ranks that share a sequence."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    cuda = torch.cuda.is_available()
    model = gpt_model(config, spec, vocabulary, length, position_embedding_type="rope", rotary_base=500000)
    if cuda:
        model = Float16Module(config, model.cuda())
    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
    )
    model = DistributedDataParallel(config, reduction, model)
    config.no_sync_func = model.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            min_lr=lr,
            weight_decay=0.01,
            clip_grad=1.0 if cuda else 0.0,
            bf16=cuda,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    model.train()
    return model, optimizer


def batches(vocabulary: int, length: int, step: int, options: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield this rank's tokens of a sequence that all draw alike; it has a pattern, so that the loss can fall."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(min(vocabulary, 512), (1, length + 1), generator=generator)
    tokens[:, 1::2] = tokens[:, :-1:2]  # every second token repeats the one before it
    whole = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(length)[None],
    }
    zigzag = MegatronConfig(data_layout="zigzag")  # Megatron's own batches, for its own attention
    sharded = shard_batch(whole, parallel_state.get_context_parallel_group(), options or zigzag)
    yield {name: part if part is None else part.contiguous().to(device) for name, part in sharded.items()}


def forward_step(iterator: Iterator[dict[str, Any]], model: Any) -> Any:
    """Return the model's output, and a function that makes the loss of it."""
    batch = next(iterator)
    output = model(**batch)

    def loss(output: torch.Tensor, **_: Any) -> Any:
        total = output.float().sum()
        count = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def mean_loss(loss: torch.Tensor) -> float:
    """Return the mean over all ranks."""
    shared = loss.detach().double().cpu()
    dist.all_reduce(shared)
    return round((shared[0] / shared[1]).item(), 4)


if __name__ == "__main__":
    main()
