"""Prove a Megatron job: many ranks are compared with one, through Megatron's own schedule and data parallelism."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.megatron.layers.core_attention import DistributedCoreAttention
from dfa_megatron.megatron.replace import reach, replace
from dfa_megatron.megatron.script.dfa_flags import options_of
from dfa_megatron.megatron.tokens import batch as batches
from dfa_megatron.megatron.tokens.cuts import DECLARED
from dfa_megatron.megatron.tokens.visit import current_visit
from dfa_megatron.proving import Job, Proof, Text, examine
from dfa_megatron.sharding import shard_sequence

_MIXERS = ("self_attention", "mixer")
"""Parts of a layer that look at several tokens."""


def prove(models: Any, *, tokens: int | None = None) -> Proof:
    """Compare a job on its context-parallel ranks with each of them alone, with Megatron's own attention; `print` it.

    A random sequence and a pack run through Megatron's schedule, over the same tensor- and pipeline-parallel ranks both
    times. Compared are the loss, the output of every attention and MLP for each token, and every gradient as Megatron's
    DDP or distributed optimizer reduces it. Weights, optimizer and random state are as before. Every rank must call
    this, between two steps; `--dfa-prove` does it before the first.

    Args:
        models: the model in Megatron's DistributedDataParallel, or its chunks of a virtual pipeline.
        tokens: of the sequence, at least; None is 48 for each rank, or twice the smallest window up to 2048.

    Raises:
        ProofError: something differs; the first layer, rank and token are named.
        UnsupportedError: the model is not in Megatron's DDP, or cannot be run on one rank.
    """
    return examine(MegatronJob(list(models) if isinstance(models, (list, tuple)) else [models]), tokens)


def prove_if_asked(args: Any) -> None:
    """Have Megatron's `train_step` prove the job once, where its arguments have `dfa_prove`."""
    if not getattr(args, "dfa_prove", False):
        return
    from megatron.training import training

    def proving(real: Callable[..., Any]) -> Callable[..., Any]:
        asked = [prove]

        def step(forward_step: Any, data: Any, model: Any, *others: Any, **more: Any) -> Any:
            while asked:
                asked.pop()(model)
            return real(forward_step, data, model, *others, **more)

        return step

    replace(training, "train_step", proving)


class MegatronJob(Job):
    """Chunks of a model in Megatron's DDP."""

    def __init__(self, models: Sequence[Any]) -> None:
        from megatron.core import parallel_state

        wrapped = all(hasattr(model, "zero_grad_buffer") and hasattr(model, "bucket_groups") for model in models)
        if not wrapped:
            raise UnsupportedError(
                f"prove of a {type(models[0]).__name__} without Megatron's DistributedDataParallel",
                "its gradients are compared as that reduces them",
                "prove of the model in megatron.core.distributed.DistributedDataParallel",
            )
        self.models, self.config = list(models), models[0].config
        self.cores = [x for model in models for x in model.modules() if isinstance(x, DistributedCoreAttention)]
        self.options = self.cores[0].options if self.cores else options_of()
        self.cp = parallel_state.get_context_parallel_group()
        self.ranks, self.tp = self.cp.size(), parallel_state.get_tensor_model_parallel_group()
        self.group = parallel_state.get_tensor_and_context_parallel_group()
        self.divisor = self.tp.size()
        self.words = min(getattr(_inside(model), "vocab_size", 1 << 30) for model in models)
        self.share = 1.0 if self.config.calculate_per_token_loss else 1 / self.ranks
        self.micro_batches = self.config.pipeline_model_parallel_size if len(models) > 1 else 1
        sizes = {"cp": self.ranks, "tp": self.tp.size(), "pp": self.config.pipeline_model_parallel_size}
        said = ", ".join(f"{name} {size}" for name, size in sizes.items())
        dtype = str(self.config.params_dtype).removeprefix("torch.")
        self.title = f"{type(_inside(models[0])).__name__} in {dtype}, {said}, layout {self.options.data_layout}"

    def watched(self) -> Iterator[tuple[str, torch.nn.Module, bool]]:
        """Yield attention, or another mixer, and MLP of every layer: inside of a layer there is one order of tokens."""
        for model in self.models:
            for name, layer in model.named_modules():
                if hasattr(layer, "layer_number") and any(hasattr(layer, part) for part in _MIXERS):
                    place = _named(model, name)
                    for part in (*_MIXERS, "mlp"):
                        if hasattr(layer, part):
                            yield f"{place}.{part}", getattr(layer, part), part in _MIXERS

    def places(self, text: Text, *, alone: bool) -> torch.Tensor:
        """Return the tokens of this rank inside of layers; sequence parallelism splits them once more."""
        at = torch.arange(len(text.ids))
        if not alone and self.ranks > 1:
            layout = "zigzag" if self.options.data_layout == "zigzag" else "contiguous"
            at = shard_sequence(at[None], group=self.cp, layout=layout)[0]
        return at.chunk(self.tp.size())[self.tp.rank()] if self.config.sequence_parallel else at

    def windows(self) -> Iterator[int]:
        """Yield the windows of layers, with the token itself."""
        return (x.window_size[0] + 1 for x in self.cores if x.window_size[0] >= 0)

    def unseen(self) -> Iterator[str]:
        """Yield what a script does itself."""
        yield "the script's own batches and its loss function"

    def step(self, text: Text, *, alone: bool) -> torch.Tensor | None:
        """Run Megatron's schedule over one text."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        counted: list[torch.Tensor] = []
        given = self._batch(text, alone=alone)
        total = (text.targets >= 0).sum()

        def loss(output: torch.Tensor, **_: Any) -> Any:
            mine = (output.float() * given["loss_mask"]).sum()
            counted.append(mine.detach().clone())
            if self.config.calculate_per_token_loss:
                return mine, given["loss_mask"].sum().int(), {}
            return mine / total, {}

        def forward(data: Any, model: Any) -> Any:
            return model(**{name: x for name, x in given.items() if name != "loss_mask"}), loss

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(()) for _ in self.models],
            model=self.models,
            num_microbatches=self.micro_batches,
            seq_length=len(text.ids) * (self.ranks if alone else 1),
            micro_batch_size=1,
            forward_only=False,
        )
        if not counted:
            return None
        if not alone:
            dist.all_reduce(counted[-1], group=self.cp)
        return counted[-1] / total

    def _batch(self, text: Text, *, alone: bool) -> dict[str, Any]:
        """Return what the model takes, and the loss mask: this rank's part, or all of it."""
        targets = text.targets[None]
        whole = {
            "tokens": text.ids[None],
            "labels": targets.clamp(min=0),
            "loss_mask": (targets >= 0).float(),
            "position_ids": text.positions[None],
        }
        ends = torch.arange(0, len(text.ids) + 1, len(text.ids) // text.documents, dtype=torch.int32)
        pack: dict[str, Any] = {"cu_seqlens": ends[None].to(text.ids.device)}
        if alone and self.ranks > 1:
            pack["local_cp_size"] = torch.tensor(1)
        elif text.documents == 1:
            pack = {}
        return batches.shard_batch({**whole, **pack}, self.cp, self.options)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute attention by Megatron's own core, one row for each document; a batch is this rank's alone."""
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        scale, weigh, ranks = self.config.grad_scale_func, MTPLossAutoScaler.set_loss_scale, self.ranks
        with ExitStack() as stack:

            def meanwhile(owner: Any, **values: Any) -> None:
                stack.enter_context(for_a_while(owner, **values))

            for core in self.cores:
                meanwhile(core, forward=functools.partial(_own_attention, core, _megatrons_core(core)))
            for router in [x for model in self.models for x in model.modules() if hasattr(x, "tp_cp_group")]:
                meanwhile(router, tp_cp_group=self.tp if ranks > 1 else router.tp_cp_group)
            if not self.config.calculate_per_token_loss:
                # The schedule multiplies losses, those of routers too, by the ranks, of which each now has them whole.
                meanwhile(self.config, grad_scale_func=lambda loss: (loss if scale is None else scale(loss)) / ranks)
                if getattr(self.config, "mtp_grad_scale_func", None) is None:  # all but those of prediction layers
                    meanwhile(MTPLossAutoScaler, set_loss_scale=staticmethod(lambda factor: weigh(factor * ranks)))
            yield

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what Megatron reduced: main gradients, or this rank's part of them for the distributed optimizer."""
        for model in self.models:
            names = {x: _named(model, name) for name, x in model.named_parameters()}
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                sharded = group.ddp_config.use_distributed_optimizer
                for bucket in group.buckets:
                    size = bucket.grad_data.numel()
                    first = 0
                    if sharded:
                        size //= group.intra_distributed_optimizer_instance_size
                        first = size * group.intra_distributed_optimizer_instance_rank
                    for parameter, (lo, hi) in bucket.param_to_index.items():
                        gradient = parameter.main_grad
                        if sharded:
                            gradient = gradient.flatten()[max(first - lo, 0) : max(min(hi, first + size) - lo, 0)]
                        if gradient.numel():
                            yield names[parameter], gradient

    def clear(self) -> None:
        """Zero Megatron's buffers."""
        super().clear()
        for model in self.models:
            model.zero_grad_buffer()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Finish gradients as Megatron's training does, and restore its random states and what its batches declared.

        No step is run again, so Megatron's checks of a step's results do without their machine for that.
        """
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
        from megatron.core.tensor_parallel import get_cuda_rng_tracker
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        machine, tracker, declared = get_rerun_state_machine(), get_cuda_rng_tracker(), dict(DECLARED)
        mode, machine.mode = machine.mode, RerunMode.DISABLED
        states, finish = tracker.get_states(), self.config.finalize_model_grads_func
        if finish is None:
            self.config.finalize_model_grads_func = finalize_model_grads
        try:
            yield
        finally:
            self.config.finalize_model_grads_func, machine.mode = finish, mode
            tracker.set_states(states)
            moe_utils.clear_aux_losses_tracker()
            MTPLossLoggingHelper.tracker.clear()
            DECLARED.clear()
            DECLARED.update(declared)


def _inside(model: Any) -> Any:
    """Return the model inside of its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _named(model: Any, name: str) -> str:
    """Return a name without those of wrappers, and with the number of the layer in the whole model."""
    words = [word for word in name.split(".") if word != "module"]
    if words[:2] == ["decoder", "layers"]:
        words[2] = str(_inside(model).decoder.layers[int(words[2])].layer_number - 1)
    return ".".join(words)


def _megatrons_core(core: DistributedCoreAttention) -> Any:
    """Return Megatron's own attention for a layer; None where it has none without Transformer Engine."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    config = copy.copy(core.config)
    if getattr(config, "multi_latent_attention", False):
        return None
    config.context_parallel_size, config.masked_softmax_fusion, config.attention_dropout = 1, False, 0.0
    theirs: Any = DotProductAttention(config, core.layer_number, AttnMaskType.causal, "self")
    if isinstance(core.softmax_offset, torch.nn.Parameter):
        theirs.softmax_offset = core.softmax_offset
    return theirs.train()


def _own_attention(
    core: DistributedCoreAttention,
    theirs: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Compute attention of documents of one length, (tokens, 1, heads, width), each a sample of its own."""
    reach("attention")
    visit = current_visit()
    documents = 1 if visit is None or visit.pack is None else len(visit.pack.offsets) - 1
    q, k, v = (x.unflatten(0, (documents, -1)).squeeze(2).transpose(0, 1).contiguous() for x in (query, key, value))
    if theirs is None:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=core.softmax_scale)
        out = out.permute(2, 0, 1, 3).flatten(2)
    else:
        mask = torch.ones(1, 1, len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        out = checkpoint(theirs, q, k, v, mask, use_reentrant=False, preserve_rng_state=False)  # not all layers' scores
    rows: torch.Tensor = out.transpose(0, 1).flatten(0, 1)[:, None]
    return rows
