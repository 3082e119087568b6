"""A tiny real GPTModel, Megatron-Core's real schedules and real text, with weights that no topology can change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.megatron.stand_in import use_cpu
from dfa_megatron.runtime.counters import COUNTERS
from tests.megatron import attends, padded_packs
from tests.megatron.attends import BATCH as BATCH
from tests.megatron.attends import SEQUENCE as SEQUENCE
from tests.support import megatron_model as small_model
from tests.support.megatron_model import Parallel, config_of, global_name, mean_loss, megatrons_spec, places_of

LAYERS, HIDDEN, HEADS, GROUPS, FFN = 4, 64, 4, 2, 128
MICRO_BATCHES, STEPS, VOCABULARY = 2, 6, 256
LEARNING_RATE, WEIGHT = 2e-3, 0.05
"""Of Adam, and the scale of initial weights."""


@dataclass(frozen=True)
class Topology:
    """How many ranks of what; sequence parallelism goes with tp > 1."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    vp: int | None = None
    dp: int = 1
    ep: int = 1
    """Expert parallelism, over the ranks of dp and cp."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True)
class Case:
    """One training run."""

    options: MegatronConfig | None
    """None: Megatron's own attention (one rank only)."""
    recompute: tuple[str, int] | None = None
    """--recompute-granularity full with this method and number of layers."""
    dropout: float = 0.0
    steps: int = STEPS
    config: tuple[tuple[str, Any], ...] = ()
    overlap: bool = False
    """DDP reduces gradients, and the distributed optimizer gathers parameters, beside the computation."""
    pairs: str = ""
    """What every micro-batch has of `attends`: "documents" in every row, a "tree", or a "mask"."""
    masked: bool = False
    """Experts get a padding_mask: other lengths in every row, of one token in the last micro-batch."""
    padded: bool = False
    """Those are padded and cut zigzag one by one, as Transformer Engine wants them."""
    optimizer: str = "torch"
    """torch: PyTorch's Adam. megatron: Megatron's around it. distributed: Megatron's, spread over data ranks."""
    wrapper: str = "ddp"
    """ddp, torch_fsdp2, or megatron_fsdp:STRATEGY (see sharded.py)."""
    slack: float = 1.0
    """By which rounding exceeds the limits, where Megatron's own layers over data ranks exceed them as well."""


MEGATRONS = Case(options=None)


def case(layout: str = "contiguous", checkpoint: str = "none", **changes: Any) -> Case:
    """A case by its two usual options; checkpoint "remat" comes from Megatron's flag, as users ask for it."""
    recompute = ("uniform", 1) if checkpoint == "auto" else None
    given = {"recompute": recompute, **changes}
    return Case(MegatronConfig(data_layout=layout, checkpoint=checkpoint), **given)


@dataclass
class Run:
    """What a rank saw of a training run."""

    losses: list[float]
    """Mean loss of the global batch at every step; empty but on the last pipeline stage."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, by global parameter name: this rank's shard, averaged as Megatron averages."""
    places: dict[str, dict[int, torch.Tensor]]
    """Of each of them in the whole, where tensor-parallel ranks share it: indices by dimension."""
    counts: dict[str, int]
    """COUNTERS after the first step."""
    norm: float | None = None
    """Of the first step's gradient, as Megatron's optimizers find it over all ranks: Adam would hide a wrong factor."""


@cache
def text() -> torch.Tensor:
    """English prose that every CPython carries, as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()


def micro_batch(step: int, micro: int) -> dict[str, torch.Tensor]:
    """The global micro-batch, (batch, sequence) each."""
    start = (step * MICRO_BATCHES + micro) * BATCH * (SEQUENCE + 1)
    rows = text()[start : start + BATCH * (SEQUENCE + 1)].view(BATCH, SEQUENCE + 1)
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "loss_mask": loss_mask(1000 * step + micro),
        "position_ids": torch.arange(SEQUENCE).expand(BATCH, -1).contiguous(),
    }


def loss_mask(seed: int, length: int = SEQUENCE, rows: int = BATCH) -> torch.Tensor:
    """What each token of a batch counts, (rows, length): tokens with holes, and none on one rank or on several.

    By turns a prompt fills the first rank of tokens in order, padding the last, a single token of a row counts, or
    the ends are left out, which the first rank of zigzag tokens holds.
    """
    draw = torch.Generator().manual_seed(seed)
    counts = torch.rand(rows, length, generator=draw) < 0.6
    cut = length // 2 + 3  # more than a rank of two
    single = int(torch.randint(2, length, (), generator=draw))
    windows = ((cut, length), (0, length - cut), (single, single + 1), (length // 4, 3 * length // 4))
    lo, hi = windows[(seed // 1000 + 2 * seed) % 4]
    counts[:, hi - 1] = True
    counts[:, :lo] = counts[:, hi:] = False
    return counts.float()


def start(topology: Topology) -> None:
    """Make the process groups; the process must have a default group already, and is on a GPU where it sees one."""
    if not torch.cuda.is_available():
        use_cpu()
    from megatron.core import parallel_state

    # Megatron closes the gloo groups among those it forgets: no rank may still be in a collective of one of them.
    dist.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        topology.tp,
        topology.pp,
        topology.vp,
        context_parallel_size=topology.cp,
        expert_model_parallel_size=topology.ep,
    )
    seed()


def seed() -> None:
    """The same random state at the start of every run."""
    from megatron.core import tensor_parallel

    torch.manual_seed(7)
    tensor_parallel.get_cuda_rng_tracker().reset()
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def make_config(topology: Topology, wanted: Case, **changes: Any) -> Any:
    """The TransformerConfig of the tiny model."""
    method, layers = wanted.recompute or (None, None)
    fields: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "ffn_hidden_size": FFN,
        "attention_dropout": 0.0,
        "hidden_dropout": wanted.dropout,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "sequence_parallel": True,
        "cp_comm_type": "dfa",
        "recompute_granularity": "full" if wanted.recompute else None,
        "recompute_method": method,
        "recompute_num_layers": layers,
    }
    sizes = Parallel(topology.tp, topology.pp, topology.cp, topology.vp, wanted.options, topology.ep)
    given = {"use_cpu_initialization": not torch.cuda.is_available(), **dict(wanted.config), **changes}
    return config_of(fields, sizes, **given)


def make_model(config: Any, options: MegatronConfig | None, vp_stage: int | None = None) -> Any:
    """One model chunk with the harness's weights."""
    more = {"mtp_block_spec": prediction_spec(config, options)} if config.mtp_num_layers else {}
    return small_model.build_chunk(
        config,
        options,
        vp_stage,
        WEIGHT,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **more,
    ).to(device())


def set_weights(made: Any) -> None:
    """Give the harness's weights to a model that another function made."""
    small_model.set_weights(made, WEIGHT)


def prediction_spec(config: Any, options: MegatronConfig | None) -> Any:
    """Multi-token prediction layers like the decoder's."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from dfa_megatron.megatron import distribute_attention

    layer = megatrons_spec(config)
    if options is not None:
        layer = distribute_attention(layer, config, config=options)
    block = TransformerBlockSubmodules(layer_specs=[layer])
    return get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)


def train(topology: Topology, wanted: Case, *, load: str = "", save: str = "", first_step: int = 0) -> Run:
    """Train from the harness's weights; the process groups must stand (see `start`).

    With `load` or `save`, from or to a torch_dist checkpoint of model and optimizer in that folder.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from tests.megatron import checkpoints, sharded

    seed()
    config = make_config(topology, wanted)
    stages = range(topology.vp) if topology.vp else [None]
    chunks = [make_model(config, wanted.options, stage) for stage in stages]
    models = [
        sharded.wrap(
            wanted.wrapper,
            config,
            chunk,
            overlap_grad_reduce=wanted.overlap,
            overlap_param_gather=wanted.overlap and wanted.optimizer == "distributed",
            use_distributed_optimizer=wanted.optimizer == "distributed",
            bucket_size=4096,  # parameters: several buckets, which are reduced while layers before them still compute
        )
        for chunk in chunks
    ]
    names = {id(p): global_name(chunk, name) for chunk in chunks for name, p in chunk.named_parameters()}
    config.finalize_model_grads_func = finalize_model_grads if sharded.finalizes(models[0]) else None
    if wanted.overlap:
        config.no_sync_func = [model.no_sync for model in models] if topology.vp else models[0].no_sync
    parameters = [p for model in models for p in model.parameters()]
    optimizer = make_optimizer(wanted, models)
    run = Run([], {}, {}, {})
    if load:
        checkpoints.load(load, chunks[0], optimizer)
    COUNTERS.reset()
    for step in range(first_step, wanted.steps):
        for model in models:
            model.train()
            model.zero_grad_buffer()
        reduced = get_forward_backward_func()(
            forward_step_func=forward_step(wanted),
            data_iterator=[batches(wanted, step) for _ in models] if topology.vp else batches(wanted, step),
            model=models if topology.vp else models[0],
            num_microbatches=MICRO_BATCHES // topology.dp,
            seq_length=length_of(wanted, topology),
            micro_batch_size=1 if wanted.pairs == "documents" else BATCH,
            forward_only=False,
        )
        if step == 0:
            run.counts = COUNTERS.snapshot()
        if step == 0 and wanted.optimizer != "distributed":  # which leaves each rank a part of the summed gradients
            for p in parameters:
                whole = p.grad.full_tensor() if wanted.wrapper == "torch_fsdp2" else p.main_grad
                run.gradients[names[id(p)]] = whole.cpu().clone()
                run.places[names[id(p)]] = places_of(names[id(p)], p, config)[1]
        if (loss := mean_loss(reduced)) is not None:
            run.losses.append(loss.item())
        if wanted.optimizer == "torch" and wanted.wrapper == "ddp":
            for p in parameters:
                p.grad = p.main_grad
        stepped = optimizer.step()
        if step == 0 and wanted.optimizer != "torch":
            run.norm = stepped[1]
        for p in parameters:
            p.grad = None  # left in place, autograd would add the next gradient to main_grad, and DDP once more
    if save:
        checkpoints.save(save, chunks[0], optimizer)
    return run


def length_of(wanted: Case, topology: Topology) -> int:
    """Tokens of a row, as Megatron's schedules want to know them."""
    if wanted.padded:
        return padded_packs.total_of(torch.Size((BATCH, SEQUENCE)), topology.cp, topology.tp)
    return SEQUENCE * BATCH if wanted.pairs == "documents" else SEQUENCE


def make_optimizer(wanted: Case, models: list[Any]) -> Any:
    """Adam, as the case asks for it."""
    if wanted.optimizer == "torch":
        return torch.optim.Adam([p for model in models for p in model.parameters()], lr=LEARNING_RATE, eps=1e-6)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chosen = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        weight_decay=0.0,
        adam_beta2=0.999,
        adam_eps=1e-6,
        clip_grad=1e9,  # clips nothing, but asks for the norm
        use_distributed_optimizer=wanted.optimizer == "distributed",
        overlap_param_gather=wanted.overlap,
    )
    return get_megatron_optimizer(chosen, models)


def batches(wanted: Case, step: int) -> Iterator[dict[str, torch.Tensor | None]]:
    """This rank's micro-batches of a step."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch

    data_rank, data_ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for micro in range(data_rank, MICRO_BATCHES, data_ranks):
        whole = micro_batch(step, micro)
        whole |= attends.entries(wanted.pairs, step, micro)
        if wanted.masked:
            lengths = torch.tensor([[1], [0]] if micro else [[SEQUENCE // 4], [SEQUENCE * 2 // 3]])
            whole["padding_mask"] = torch.arange(SEQUENCE) >= lengths
        if wanted.options is None:
            yield dict(whole)
        elif wanted.padded:
            ranks, rank = (getattr(parallel_state, f"get_context_parallel_{n}")() for n in ("world_size", "rank"))
            splits = parallel_state.get_tensor_model_parallel_world_size()
            yield padded_packs.cut(
                whole, ranks, rank, padded_packs.total_of(whole["tokens"].shape, ranks, splits), micro
            )
        else:
            batch = shard_batch(whole, parallel_state.get_context_parallel_group(), wanted.options)
            yield {name: x.to(device()) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def forward_step(wanted: Case) -> Any:
    """Megatron's forward_step_func: the model's output and a function that makes the loss of it."""
    mask = attends.hidden_above(SEQUENCE) if wanted.options is None else None

    def step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(iterator)
        if wanted.pairs and wanted.options is None:
            output = attends.alone(batch, model)
        else:
            given = taken(batch, attention_mask=mask)
            chunk = getattr(model, "module", model)  # a stage gets what Megatron's scripts give it
            first, last = (getattr(chunk, name, True) for name in ("pre_process", "post_process"))
            if not (first or (last and chunk.config.mtp_num_layers)):
                given |= {"input_ids": None, "position_ids": None}
            output = model(**(given if last else {**given, "labels": None}))

        return output, loss_function(batch, per_token="calculate_per_token_loss" in dict(wanted.config))

    return step


def taken(batch: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a model takes of a batch: of `shard_batch`, of Megatron's own, or of `padded_packs.cut`."""
    named = {"input_ids": batch.get("tokens"), "packed_seq_params": batch.get("params"), "attention_mask": None}
    names = ("position_ids", "labels", "loss_mask", "padding_mask", *named)
    return {**named, **{name: batch[name] for name in names if name in batch}, **more}


def share_of_loss(losses: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """This rank's part of the mean loss that the first step reports, of its losses (batch, tokens) in a micro-batch."""
    count = sum(micro_batch(0, micro)["loss_mask"].sum() for micro in range(MICRO_BATCHES))
    share: torch.Tensor = (losses.float() * batch["loss_mask"]).sum() / count
    return share


def loss_function(batch: dict[str, torch.Tensor], *, per_token: bool) -> Any:
    """The mean over the counted tokens of a micro-batch, or with per_token their sum, which Megatron divides.

    Megatron's own scripts divide by the tokens that a rank counts, which gives another loss on several ranks.
    """
    from megatron.core import parallel_state

    def loss(output: torch.Tensor, **_: Any) -> Any:
        total, count = (output.float() * batch["loss_mask"]).sum(), batch["loss_mask"].sum()
        reported = {"lm loss": torch.stack([total.detach(), count])}
        if per_token:
            return total, count.int(), reported
        every = count.clone()
        dist.all_reduce(every, group=parallel_state.get_context_parallel_group())
        return total / every, reported

    return loss


def save_references(rank: int, world_size: int, cases: list[tuple[str, Case]]) -> None:
    """Megatron's own attention on one rank: each path gets the losses and first gradients of its case."""
    start(Topology())
    for path, wanted in cases:
        run = train(Topology(), wanted)
        torch.save({"losses": run.losses, "gradients": run.gradients}, path)


def check_topologies(rank: int, world_size: int, cases: list[tuple[Topology, Case, dict[str, int], str]]) -> None:
    """Train each case in its topology and compare it with the reference at its path."""
    standing = None
    for topology, wanted, counts, path in cases:
        if topology != standing:
            start(topology)
            standing = topology
        reference = torch.load(path, weights_only=True)
        run = train(topology, wanted)
        compare(run, reference, f"{topology} {wanted} on rank {rank}", wanted.slack)
        for name, count in counts.items():
            assert run.counts[name] == count, f"{topology} {wanted}: {name} is {run.counts[name]}, not {count}"


def check_same_dropout(rank: int, world_size: int, topology: Topology) -> None:
    """With dropout in the layers, rematerialization changes nothing, to the bit, and dropout does drop."""
    start(topology)
    plain, rematerialized, megatrons = (
        train(topology, case(checkpoint=checkpoint, recompute=recompute, dropout=0.1, steps=1))
        for checkpoint, recompute in (("none", None), ("auto", ("uniform", 1)), ("none", ("uniform", 1)))
    )
    assert rematerialized.counts["replays"] > 0
    assert plain.losses == rematerialized.losses == megatrons.losses
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, rematerialized.gradients[name]), f"{topology}: {name}"
    undropped = train(topology, case(steps=1))
    assert undropped.losses != plain.losses[:1] or not plain.losses


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def compare(run: Run, reference: dict[str, Any], where: str, slack: float = 1.0) -> None:
    """First loss and every gradient within 1e-5 (of the gradient's largest entry), all losses within 1e-4.

    Ten times that on GPUs, whose matrix products sum in another order than the reference's on a CPU.
    """
    slack *= 10 if torch.cuda.is_available() else 1
    from megatron.core import parallel_state

    assert bool(run.losses) == parallel_state.is_pipeline_last_stage(ignore_virtual=True), where
    for step, (loss, expected) in enumerate(zip(run.losses, reference["losses"], strict=False)):
        limit = slack * (1e-5 if step == 0 else 1e-4)
        assert abs(loss - expected) <= limit, f"{where}: loss {loss} at step {step}, {expected} on one rank"
    assert run.gradients or run.norm or not run.losses, f"{where}: nothing was compared"
    if run.norm is not None:
        whole = torch.cat([gradient.flatten() for gradient in reference["gradients"].values()]).norm().item()
        assert abs(run.norm - whole) <= slack * 1e-5 * whole, f"{where}: a gradient of norm {run.norm}, not {whole}"
    for name, gradient in run.gradients.items():
        expected = reference["gradients"][name]
        largest = expected.abs().max()
        for dimension, held in run.places[name].items():
            expected = expected.index_select(dimension, held)
        error = (gradient - expected).abs().max() / largest
        assert error <= slack * 1e-5, f"{where}: the gradient of {name} is off by {error:.2e}"
