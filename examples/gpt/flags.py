"""The flags of the example, named as Megatron's own, and the numbers that follow from them and the number of ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from dfa_megatron import MegatronConfig
from gpt.errors import UserError


def parse_flags(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; a wrong flag ends the program as argparse does."""
    parser = argparse.ArgumentParser(
        description="Train a Megatron-Core GPT on text, its attention distributed over the ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument(
        "--nproc-per-node", type=int, help="ranks to start; without torchrun only (default: one per GPU, 2 on CPU)"
    )
    parallel.add_argument("--context-parallel-size", type=int, help="default: all ranks that the others leave")
    parallel.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parallel.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parallel.add_argument("--sequence-parallel", action="store_true")
    parallel.add_argument("--use-distributed-optimizer", action="store_true")
    MegatronConfig.add_arguments(parser)
    return parser.parse_args(argv)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, default=2)
    group.add_argument("--hidden-size", type=int, default=128)
    group.add_argument("--ffn-hidden-size", type=int, help="default: four times the hidden size")
    group.add_argument("--num-attention-heads", type=int, default=4)
    group.add_argument("--num-query-groups", type=int, help="key/value heads (default: as many as query heads)")
    group.add_argument("--seq-length", type=int, default=4096)
    group.add_argument("--vocab-size", type=int, help="needed with an indexed dataset; text is read as 256 bytes")
    group.add_argument("--init-method-std", type=float, default=0.05)
    group.add_argument("--rotary-base", type=int, default=500, help="small: a byte depends on the bytes just before it")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", help="a text file, or the prefix of an indexed dataset (default: Python's manual)")
    group.add_argument("--train-iters", type=int, default=240)
    group.add_argument("--micro-batch-size", type=int, default=1)
    group.add_argument("--global-batch-size", type=int, help="default: one micro-batch per data-parallel rank")
    group.add_argument("--lr", type=float, default=3e-3)
    group.add_argument("--min-lr", type=float, default=3e-4)
    group.add_argument("--lr-warmup-iters", type=int, default=10)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--clip-grad", type=float, default=1.0)
    group.add_argument("--hidden-dropout", type=float, default=0.0)
    group.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="default: on GPUs, and never on CPU")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument(
        "--recompute-granularity",
        choices=("full", "none"),
        default="full",
        help="full: keep attention's output and recompute the rest of a layer",
    )
    group.add_argument("--save-report", metavar="DIR", help="default: runs/ and the time of the start")
    group.add_argument("--log-interval", type=int, default=10, help="steps per line where there is no terminal")


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save", metavar="DIR", help="write a checkpoint at the end, in Megatron's format")
    group.add_argument("--save-interval", type=int, metavar="N", help="and after every N steps")
    group.add_argument("--load", metavar="DIR", help="go on from the last checkpoint there")
    group.add_argument("--exit-interval", type=int, metavar="N", help="end after a step that N divides")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hold the sizes that follow from the flags and the number of ranks."""

    tensor: int
    pipeline: int
    context: int
    data: int
    micro_batches: int
    bf16: bool

    @property
    def context_name(self) -> str:
        """For a line of text."""
        parts = {"context": self.context, "tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        return " x ".join(f"{name} {size}" for name, size in parts.items() if size > 1 or name == "context")


def settle(args: argparse.Namespace, ranks: int, *, cuda: bool) -> Sizes:
    """Divide the ranks and check what must divide, before any rank waits for another.

    Raises:
        UserError: something does not fit; the message gives the numbers.
    """
    for name, value in vars(args).items():
        if type(value) is int and value < 1 and name not in ("seed", "lr_warmup_iters"):
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if args.save_interval and not args.save:
        raise UserError("--save-interval needs --save DIR, the folder to save into")
    if args.use_distributed_optimizer and (args.save or args.load):
        raise UserError(
            "--save and --load do not work with --use-distributed-optimizer, for Megatron-Core cannot load its state "
            "around PyTorch's Adam; leave that flag out"
        )
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    model = tensor * pipeline
    _divides(ranks, model, f"{ranks} ranks", f"tensor {tensor} x pipeline {pipeline}")
    context = args.context_parallel_size or ranks // model
    _divides(ranks, model * context, f"{ranks} ranks", f"tensor {tensor} x pipeline {pipeline} x context {context}")
    data = ranks // (model * context)
    batch = args.global_batch_size or args.micro_batch_size * data
    per_step = args.micro_batch_size * data
    _divides(batch, per_step, f"--global-batch-size {batch}", f"micro-batch {args.micro_batch_size} x data {data}")
    _divides(args.seq_length, context, f"--seq-length {args.seq_length}", f"the {context} context-parallel ranks")
    rows = args.seq_length // context
    heads, groups = args.num_attention_heads, args.num_query_groups or args.num_attention_heads
    _divides(heads, groups, f"--num-attention-heads {heads}", f"--num-query-groups {groups}")
    _divides(args.hidden_size, heads, f"--hidden-size {args.hidden_size}", f"--num-attention-heads {heads}")
    _divides(heads, tensor, f"--num-attention-heads {heads}", f"--tensor-model-parallel-size {tensor}")
    _divides(args.num_layers, pipeline, f"--num-layers {args.num_layers}", f"--pipeline-model-parallel-size {pipeline}")
    if args.sequence_parallel:
        if tensor == 1:
            raise UserError("--sequence-parallel needs --tensor-model-parallel-size of at least 2")
        _divides(rows, tensor, f"the {rows} tokens of a rank", f"--tensor-model-parallel-size {tensor}")
    if args.bf16 and not cuda:
        raise UserError("--bf16 needs GPUs: Megatron's mixed-precision optimizer takes CUDA tensors only")
    return Sizes(tensor, pipeline, context, data, batch // per_step, cuda if args.bf16 is None else args.bf16)


def _divides(whole: int, by: int, whole_name: str, by_name: str) -> None:
    if whole % by:
        raise UserError(f"{whole_name} cannot be divided by {by_name} without a rest ({whole} / {by})")
