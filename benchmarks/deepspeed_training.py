"""Trains model shapes with ZeRO-3 over sequences shared by all GPUs: our attention beside DeepSpeed's Ulysses.

    torchrun --nproc-per-node 4 benchmarks/deepspeed_training.py --out results.json
    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 benchmarks/deepspeed_training.py --dry-run      # the same, tiny

Layers and vocabulary are cut, which the output says; both methods share one engine per shape, so that only attention
and checkpointing differ. A case that runs out of memory, that Ulysses refuses, or for which no time is left is recorded
so.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.huggingface import distribute_attention, local_attention
from dfa_megatron.huggingface.checkpointing import set_checkpointing
from dfa_megatron.huggingface.model import transformers_model


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder layer; head_dim is 128."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


SHAPES = {
    "llama-3-8b": Shape(4096, 14336, 32, 8),
    "qwen2.5-7b": Shape(3584, 18944, 28, 4),
    "33-heads": Shape(4224, 11264, 33, 33),
}
METHODS = (("dfa", "remat"), ("ulysses", "full"), ("dfa", "full"), ("dfa", "none"), ("ulysses", "none"))
"""Attention and checkpointing, in the order in which time is spent on them."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 65536, 131072], help="of whole sequences")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=2, help="timed ones, after one that is not")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--methods", nargs="+", default=["-".join(method) for method in METHODS])
    parser.add_argument("--budget", type=float, default=210.0, help="seconds; later cases are left out")
    parser.add_argument("--offload-optimizer", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU too")
    args = parser.parse_args()
    if args.dry_run:
        args.lengths, args.layers, args.vocabulary, args.steps = [64, 128], 2, 128, 1
    return args


def shape_of(name: str, dry: bool) -> Shape:
    """The shape, or one with the same relations between its heads."""
    shape = SHAPES[name]
    if not dry:
        return shape
    kv_heads = max(2, shape.kv_heads // 4) if shape.kv_heads < shape.heads else 3
    heads = kv_heads if shape.kv_heads == shape.heads else kv_heads * (shape.heads // shape.kv_heads)
    return Shape(heads * 8, 32, heads, kv_heads)


def build(shape: Shape, args: argparse.Namespace) -> Any:
    """An engine at ZeRO-3 around a new model with PyTorch's own attention."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=max(args.lengths),
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device()):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    zero: dict[str, Any] = {"stage": 3}
    if args.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": not args.dry_run}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "dist_flash_attention": {"enabled": True, "schedule": args.schedule, "kernel": args.kernel},
    }
    engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    engine.train()
    return engine


@contextlib.contextmanager
def attention(engine: Any, method: str, checkpoint: str, args: argparse.Namespace) -> Iterator[None]:
    """Within it the engine's model has that attention and checkpointing; nothing else of it changes."""
    model, mesh = engine.module, dfa_ds.mesh_of(engine)
    inner = transformers_model(model)
    # The first name is the newer one.
    (getattr(inner, "activation_checkpointing_disable", None) or inner.gradient_checkpointing_disable)()
    if method == "dfa":
        options = DistAttentionConfig(schedule=args.schedule, kernel=args.kernel)
        distribute_attention(model, group=mesh.group, options=options, checkpoint=checkpoint)
        yield
        return
    set_checkpointing(inner, checkpoint)
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with local_attention(model):
        try:
            # The groups of a process are made once; here for every case.
            parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
            UlyssesSPAttentionHF.register_with_transformers(
                inner, core_attn_implementation="sdpa", sequence_parallel_size=mesh.size, micro_batch_size=1
            )
            with _fastest_sdpa():
                yield
        finally:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = own


@contextlib.contextmanager
def _fastest_sdpa() -> Iterator[None]:
    """cuDNN's kernel for Ulysses as well, where there is one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not torch.cuda.is_available():
        yield
        return
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        yield


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    """All ranks have done what they were given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def measure(engine: Any, length: int, vocabulary: int, steps: int) -> dict[str, Any]:
    """Tokens per second and GPU, and peak memory, of whole training steps."""
    mesh = dfa_ds.mesh_of(engine)
    ids = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device())
    batch = dfa_ds.shard_batch({"input_ids": ids, "labels": ids}, group=mesh.group)
    times = []
    for step in range(steps + 1):
        if step == 1 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        start = time.perf_counter()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        synchronize()
        times.append(time.perf_counter() - start)
    value = loss.detach().float()
    dist.all_reduce(value)
    best = min(times[1:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {
        "seconds_per_step": times[1:],
        "tokens_per_second_per_gpu": length * mesh.data_size / best / dist.get_world_size(),
        "peak_gib": peak,
        "loss": value.item() / dist.get_world_size(),
    }


def attempt(engine: Any, case: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The case with its figures, or with why there are none, which is the same on all ranks."""
    try:
        with attention(engine, case["method"], case["checkpoint"], args):
            case |= measure(engine, case["length"], args.vocabulary, args.steps)
    except torch.cuda.OutOfMemoryError as error:
        case["failed"] = f"out of memory: {str(error).splitlines()[0]}"
    except (ValueError, AssertionError) as error:  # Ulysses refuses a number of heads
        case["failed"] = str(error).splitlines()[0]
    gc.collect()
    torch.cuda.empty_cache()
    return case


def any_rank(fact: bool) -> bool:
    """Whether it holds on a rank."""
    value = torch.tensor(int(fact), device=device())
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return bool(value.item())


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, str, str]]:
    """Every case once: for each shape, the lengths from the shortest."""
    for shape in args.shapes:
        for length in sorted(args.lengths):
            for method, checkpoint in METHODS:
                if f"{method}-{checkpoint}" in args.methods:
                    yield shape, length, method, checkpoint


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases that there is time for."""
    begin, results = time.perf_counter(), []
    engine, current = None, ""
    failed: set[tuple[str, str, str]] = set()
    for shape, length, method, checkpoint in cases(args):
        key = (shape, method, checkpoint)
        named = {"shape": shape, "length": length, "method": method, "checkpoint": checkpoint}
        if key in failed:
            results.append({**named, "failed": "a shorter sequence did not run"})
            continue
        if any_rank(time.perf_counter() - begin > args.budget):
            results.append({**named, "failed": "no time left"})
            continue
        if shape != current:
            if engine is not None:
                engine.destroy()
                engine = None
                gc.collect()
                torch.cuda.empty_cache()
            engine, current = build(shape_of(shape, args.dry_run), args), shape
        result = attempt(engine, named, args)
        if "failed" in result:
            failed.add(key)
        results.append(result)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    return results


def main() -> None:
    """Run, and write what was found with what it was found on."""
    args = parse()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and serves inference
    deepspeed.init_distributed(timeout=timedelta(seconds=120))
    results = run(args)
    if dist.get_rank() == 0 and args.out is not None:
        about = {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "gpus": dist.get_world_size(),
            "zero_stage": 3,
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "note": f"{args.layers} layers and a vocabulary of {args.vocabulary}: cut from the models of these shapes",
        }
        args.out.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
