"""Estimate parameters and a GPU's memory in training, from Megatron's flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.flags import add_flags, flag, from_flags
from dfa_megatron.loss.memory import head_bytes

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Model:
    """Megatron's flags that the estimate reads; each field has the name and the default of its flag."""

    num_layers: int = flag(0)
    hidden_size: int = flag(0)
    num_attention_heads: int = flag(0)
    seq_length: int = flag(0)
    ffn_hidden_size: int | None = flag(None)
    num_query_groups: int | None = flag(None)
    kv_channels: int | None = flag(None)
    vocab_size: int = flag(0)
    micro_batch_size: int = flag(1)
    make_vocab_size_divisible_by: int = flag(128)
    tensor_model_parallel_size: int = flag(1)
    pipeline_model_parallel_size: int = flag(1)
    context_parallel_size: int = flag(1)
    num_experts: int | None = flag(None)
    hybrid_layer_pattern: str | None = flag(None)
    swiglu: bool = flag(False)
    untie_embeddings_and_output_weights: bool = flag(False)
    use_distributed_optimizer: bool = flag(False)
    recompute_granularity: str | None = flag(None)
    dfa_schedule: str = flag("auto")
    dfa_data_layout: str = flag("boundary")
    dfa_ulysses_degree: str = flag("auto")
    dfa_head_stages: int = flag(1)
    dfa_remat_offload: bool = flag(False)
    dfa_loss_tile: str = flag("off")
    dfa_mlp_tile: str = flag("off")

    @property
    def head_dim(self) -> int:
        """Return the head dimension."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn(self) -> int:
        """Return the width of the MLP between its projections; Megatron's default if the flag is missing."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def kv_heads(self) -> int:
        """Return the kv heads of the whole model."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def vocabulary(self) -> int:
        """Return the padded vocabulary, as Megatron pads it."""
        unit = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return -(-self.vocab_size // unit) * unit

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of one layer: projections, MLP, two norms (biases are left out)."""
        queries, keys = self.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        return attention + (3 if self.swiglu else 2) * self.hidden_size * self.ffn + 2 * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Return the parameters of the embedding, and of the output projection if it is not tied to it."""
        return (2 if self.untie_embeddings_and_output_weights else 1) * self.vocabulary * self.hidden_size

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.hidden_size


def model_of(flags: Sequence[str], where: str) -> Model:
    """Return the model of a list of Megatron's flags; ignore other flags.

    Args:
        where: the name of the list, for messages.

    Raises:
        UnsupportedError: a needed flag is missing or a value is no number, or the model has experts.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser, Model)
    try:
        model = from_flags(Model, parser.parse_known_args(list(flags))[0])
    except argparse.ArgumentError as error:
        raise UnsupportedError(where, str(error), "a whole number") from error
    if model.num_experts or model.hybrid_layer_pattern:
        what = f"--{'num-experts' if model.num_experts else 'hybrid-layer-pattern'} in {where}"
        why = "the estimate knows layers of attention and a dense MLP only"
        raise UnsupportedError(what, why, "--ranks, --seq-length, --heads and --kv-heads without a file")
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(model, name) <= 0:
            what = f"{where} without --{name.replace('_', '-')}"
            raise UnsupportedError(what, "the estimate needs it", "a file of configs/megatron")
    return model


def memory(model: Model, ranks: int, messages: int) -> list[tuple[str, float]]:
    """Return an estimate of the fullest GPU's peak memory, in GiB by purpose, for one data-parallel replica.

    Megatron's mixed precision: 2 bytes of weight and 4 of gradient per parameter, 12 of optimizer state, which the
    distributed optimizer splits over the context-parallel ranks. Full recomputation is taken to cover every layer.
    Pipeline: the first stage, with one micro-batch in flight per stage. With `remat_offload` what all but two layers
    keep is in host memory. Not counted: gradients of activations, workspaces of libraries, fragmentation.

    Args:
        ranks: context-parallel ranks.
        messages: bytes of the slots that attention's messages need, of all heads at once.
    """
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    layers = -(-model.num_layers // pp)
    first = model.embedding_parameters // (2 if pp > 1 and model.untie_embeddings_and_output_weights else 1)
    held = (layers * model.layer_parameters + first) / tp
    state = 6 + 12 / (ranks if model.use_distributed_optimizer else 1)
    rows = model.micro_batch_size * model.seq_length // ranks
    heads = model.num_attention_heads // tp
    out = heads * (2 * model.head_dim + 4)  # bytes of a row of attention's output and of its lse
    projections = 2 * (model.num_attention_heads + 2 * model.kv_heads) * model.head_dim / tp
    # What a layer saves beside its input and (out, lse): outputs of two norms, q, k and v, the residual, the MLP.
    inside = rows * (2 * 3 * model.hidden_size + projections)
    mlp_rows = rows if model.dfa_mlp_tile == "off" else min(rows, int(model.dfa_mlp_tile))
    mlp = mlp_rows * 2 * (3 if model.swiglu else 2) * model.ffn / tp
    kept = rows * (2 * model.hidden_size + out)
    tile = None if model.dfa_loss_tile == "off" else int(model.dfa_loss_tile)
    head = head_bytes(rows, model.vocabulary // tp, model.hidden_size, tile)
    logits = (head.tile + (head.weight_gradient + head.numbers if tile else 0)) * (pp == 1)
    found = [("weights, gradients, optimizer", held * state)]
    if model.recompute_granularity == "full":
        held_here, which = (
            (min(2, layers * pp), "two layers") if model.dfa_remat_offload else (layers * pp, "every layer")
        )
        found += [
            (f"kept of {which}: its input, out, lse", held_here * kept),
            ("one layer while it is recomputed", inside + mlp),
        ]
    elif model.dfa_mlp_tile == "off":
        found.append(("saved of every layer", layers * pp * (kept + inside + mlp)))
    else:
        found += [("saved of every layer but its MLP", layers * pp * (kept + inside)), ("one tile of an MLP", mlp)]
    found += [("logits and their gradient", logits), ("attention's messages", messages / model.dfa_head_stages)]
    return [(name, nbytes / GIB) for name, nbytes in found]


def report(model: Model, ranks: int, messages: int) -> str:
    """Format the estimate as a table."""
    rows = memory(model, ranks, messages)
    width = max(len(name) for name, _ in rows)
    lines = [f"{model.parameters / 1e9:.2f} billion parameters; estimate of one GPU's memory, GiB:"]
    lines += [f"  {name:{width}s} {size:8.2f}" for name, size in (*rows, ("together", sum(size for _, size in rows)))]
    return "\n".join(lines)
