"""Trees and masks in other models and loops than the harness's, and the errors of ranks that bring different ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import masks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import DisagreementError, DistAttentionError, UnsupportedError
from dfa_megatron.sharding import tree_positions
from tests.megatron import attends, harness
from tests.megatron.attends import SEQUENCE
from tests.megatron.harness import MEGATRONS, Topology, case
from tests.megatron.hybrids import MAMBA, stack_spec
from tests.megatron.test_all_parallelisms import TREES
from tests.megatron.test_hybrid_prediction import MODEL
from tests.support import state_kernels
from tests.support.workers import run_ranks

STATES = ("M*-",)
TREE, OTHER = (attends.forest(random.Random(seed)) for seed in (7, 8))


def model_of(kind: str, topology: Topology, layout: str | None) -> Any:
    """A GPT of these positions, or one of Megatron's hybrid class by its pattern of layers."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from dfa_megatron.megatron import distribute_attention

    is_hybrid, wanted = "*" in kind, MEGATRONS if layout is None else case(layout)
    more = {"num_layers": 3, "sequence_parallel": False, **dict(MAMBA if is_hybrid else ())}
    config = harness.make_config(topology, wanted, **more)
    spec = stack_spec() if is_hybrid else harness.megatrons_spec(config)
    spec = spec if wanted.options is None else distribute_attention(spec, config, config=wanted.options)
    pattern = {"hybrid_layer_pattern" if "Hybrid" in MODEL.__name__ else "hybrid_override_pattern": kind}
    maker: Any = MODEL if is_hybrid else GPTModel
    position = {"position_embedding_type": "rope" if is_hybrid else kind, **(pattern if is_hybrid else {})}
    model = maker(config, spec, harness.VOCABULARY, SEQUENCE, **position)
    harness.set_weights(model)
    return model.train()


def gradients_of(model: Any, losses: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Summed over the context-parallel ranks."""
    (losses * counts).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=model.cp_group)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def other_models(rank: int, ranks: int) -> None:
    """Learned positions, and hybrid models, beside one rank under an attention_mask, or that sees paths."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import shard_batch
    from tests.megatron.attends import positions

    batch: dict[str, Any] = {**harness.micro_batch(0, 0), "prompt_tree": TREE}
    places = {"position_ids": tree_positions(TREE.lengths, TREE.parents)[None]}
    wanted = {}
    harness.start(Topology(dp=ranks))
    for kind in ("learned_absolute", "*-*", *STATES):
        model = model_of(kind, Topology(dp=ranks), None)
        losses = attends.alone(batch, model) if kind in STATES else attends.under_mask({**batch, **places}, model)
        wanted[kind] = losses.detach(), gradients_of(model, losses, batch["loss_mask"])
    harness.start(Topology(cp=ranks))
    options, group = MegatronConfig(data_layout="boundary"), parallel_state.get_context_parallel_group()
    local = shard_batch(batch, group, options)
    counts = local.pop("loss_mask")
    for kind, (every, expected) in wanted.items():
        model = model_of(kind, Topology(cp=ranks), "boundary")
        losses = model(**local)
        torch.testing.assert_close(losses, every[:, positions("zigzag", SEQUENCE, ranks, rank)], rtol=1e-5, atol=1e-5)
        for name, gradient in gradients_of(model, losses, counts).items():
            assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), f"{kind}: {name}"
        with torch.no_grad():  # evaluation, without labels
            logits = model.eval()(**{**local, "labels": None})
        scores = logits.float().log_softmax(-1).gather(-1, local["labels"][..., None])[..., 0]
        torch.testing.assert_close(-scores, losses, rtol=1e-5, atol=1e-5)
    seen = shard_batch({"mask": masks.full(SEQUENCE)}, group, options)
    with pytest.raises(UnsupportedError, match=r"a mask in a Mamba or gated delta net layer"):
        model_of("*-M", Topology(cp=ranks), "boundary")(**{**local, **seen})


def own_loop(rank: int, ranks: int) -> None:
    """A loop that cuts its rows itself; then ranks whose masks do not fit, or that bring different trees."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import declare_batch_layout, shard_batch
    from tests.megatron.attends import positions

    whole, found = {**harness.micro_batch(0, 0), **attends.entries("mask", 0, 0)}, []
    harness.start(Topology(cp=ranks))

    def losses(**entries: Any) -> Any:
        seen = shard_batch(entries, parallel_state.get_context_parallel_group(), MegatronConfig(data_layout=layout))
        return model(tokens, None, None, labels=labels, **seen)

    for layout, order in (("boundary", "zigzag"), ("contiguous", "contiguous")):
        here, model = positions(order, SEQUENCE, ranks, rank), model_of("rope", Topology(cp=ranks), layout)
        tokens, labels = whole["tokens"][:, here], whole["labels"][:, here]
        if layout == "contiguous":  # the other one is Megatron's own, which nobody declares
            declare_batch_layout(parallel_state.get_context_parallel_group(), "contiguous")
        found.append((here, losses(mask=whole["mask"], mask_positions=whole["position_ids"][0])))
    with pytest.raises(DistAttentionError, match=f"a prompt_tree or mask of 24 tokens with rows of {SEQUENCE}"):
        losses(mask=masks.full(24 if rank == 1 else SEQUENCE))  # those who would wait are told
    with pytest.raises(DisagreementError, match=r"(?s)prompt tree.*prompt tree"):
        losses(prompt_tree=OTHER if rank else TREE)
    harness.start(Topology(dp=ranks))
    wanted = attends.under_mask(whole, model_of("rope", Topology(dp=ranks), None))
    for here, mine in found:
        torch.testing.assert_close(mine, wanted[:, here], rtol=1e-5, atol=1e-5)


def each(rank: int, ranks: int) -> None:
    state_kernels.install()
    with torch.compiler.set_stance("force_eager"):
        other_models(rank, ranks)
        own_loop(rank, ranks)


@pytest.mark.support("megatron", TREES)
def test_other_models_and_loops_equal_one_rank_and_different_trees_are_told_of() -> None:
    run_ranks(3, each, timeout=120)
