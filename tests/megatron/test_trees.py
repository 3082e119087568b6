"""Trees and masks in other models and loops than the harness's, and the errors of ranks that bring different ones."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import masks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import DisagreementError, DistAttentionError, UnsupportedError
from tests.megatron import attends, harness
from tests.megatron.attends import SEQUENCE
from tests.megatron.harness import MEGATRONS, Topology, case
from tests.megatron.hybrids import MAMBA, stack_spec
from tests.megatron.test_hybrid_prediction import MODEL
from tests.support import state_kernels
from tests.support.workers import run_ranks

TREE = attends.forest(random.Random(7))


def model_of(kind: str, topology: Topology, options: MegatronConfig | None) -> Any:
    """A GPT of these positions, or a "hybrid" model of attention and MLPs, with Mamba if it is a "mamba"."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from dfa_megatron.megatron import distribute_attention

    wanted, hybrid = MEGATRONS if options is None else case(options.data_layout), kind in ("hybrid", "mamba")
    config = harness.make_config(
        topology, wanted, num_layers=3, sequence_parallel=False, **dict(MAMBA if hybrid else ())
    )
    spec = stack_spec() if hybrid else harness.megatrons_spec(config)
    spec = spec if options is None else distribute_attention(spec, config, config=options)
    if not hybrid:
        model = GPTModel(config, spec, harness.VOCABULARY, SEQUENCE, position_embedding_type=kind)  # type: ignore[arg-type]
    else:
        name = "hybrid_layer_pattern" if "Hybrid" in MODEL.__name__ else "hybrid_override_pattern"
        pattern = {name: "*-M" if kind == "mamba" else "*-*"}
        model = MODEL(config, spec, harness.VOCABULARY, SEQUENCE, position_embedding_type="rope", **pattern)
    harness.set_weights(model)
    return model.train()


def run(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses of this rank's tokens, and gradients summed over the context-parallel ranks."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import packed_seq_params

    if parallel_state.get_context_parallel_world_size() == 1:
        losses = attends.under_mask({**batch, **attends.as_mask(TREE)}, model)
    else:
        given = {"labels": batch["labels"], "packed_seq_params": packed_seq_params(batch)}
        losses = model(batch["tokens"], batch["position_ids"], None, **given)
    (losses * batch["loss_mask"]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
    return losses.detach(), gradients


def other_models(rank: int, ranks: int) -> None:
    """Learned positions, and models of Megatron's hybrid class, beside one rank under an attention_mask."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import packed_seq_params, shard_batch
    from dfa_megatron.megatron.tokens.exchange import positions

    batch: dict[str, Any] = {**harness.micro_batch(0, 0), "prompt_tree": TREE}
    options, wanted = MegatronConfig(data_layout="boundary"), {}
    here = positions("zigzag", SEQUENCE, ranks, rank)
    harness.start(Topology(dp=ranks))
    kinds = ("learned_absolute", "hybrid")
    for kind in kinds:
        wanted[kind] = run(model_of(kind, Topology(dp=ranks), None), batch)
    harness.start(Topology(cp=ranks))
    local = shard_batch(batch, parallel_state.get_context_parallel_group(), options)
    for kind in kinds:
        model = model_of(kind, Topology(cp=ranks), options)
        losses, gradients = run(model, local)
        torch.testing.assert_close(losses, wanted[kind][0][:, here], rtol=1e-5, atol=1e-5)
        for name, gradient in wanted[kind][1].items():
            assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), f"{kind}: {name}"
        with torch.no_grad():  # evaluation, without labels
            logits = model.eval()(
                local["tokens"], local["position_ids"], None, packed_seq_params=packed_seq_params(local)
            )
        scores = logits.float().log_softmax(-1).gather(-1, local["labels"][..., None])[..., 0]
        torch.testing.assert_close(-scores, losses, rtol=1e-5, atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"a prompt_tree or a mask in a Mamba or gated delta net layer"):
        run(model_of("mamba", Topology(cp=ranks), options), local)


def own_loop(rank: int, ranks: int) -> None:
    """A loop that cuts its rows itself; then ranks that bring different trees, or a tree and a mask."""
    from megatron.core import parallel_state

    from dfa_megatron.megatron import declare_batch_layout, packed_seq_params

    whole = {**harness.micro_batch(0, 0), **attends.entries("mask", 0, 0)}
    batch = {name: whole[name].chunk(ranks, 1)[rank] for name in ("tokens", "labels", "loss_mask")}
    harness.start(Topology(cp=ranks))
    declare_batch_layout(parallel_state.get_context_parallel_group(), "contiguous")
    model = model_of("rope", Topology(cp=ranks), MegatronConfig(data_layout="contiguous"))

    def losses(**entries: Any) -> Any:
        params = packed_seq_params(entries)
        return model(batch["tokens"], None, None, labels=batch["labels"], packed_seq_params=params)

    found = losses(mask=whole["mask"], mask_positions=whole["position_ids"][0])
    with pytest.raises(DistAttentionError, match=f"a prompt_tree or mask of 24 tokens with rows of {SEQUENCE}"):
        losses(mask=masks.full(24 if rank == 1 else SEQUENCE))  # those who would wait are told
    others = {"prompt_tree": attends.forest(random.Random(8))} if rank else {"prompt_tree": TREE}
    with pytest.raises(DisagreementError, match=r"(?s)prompt tree.*prompt tree"):
        losses(**others)
    harness.start(Topology(dp=ranks))
    wanted = attends.under_mask(whole, model_of("rope", Topology(dp=ranks), None))
    torch.testing.assert_close(found, wanted.chunk(ranks, 1)[rank], rtol=1e-5, atol=1e-5)


def each(rank: int, ranks: int) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from dfa_megatron.megatron.cpu.mamba import megatrons_stack

    state_kernels.install()
    vars(sys.modules[megatrons_stack().__module__])["TENorm"] = WrappedTorchNorm
    with torch.compiler.set_stance("force_eager"):
        other_models(rank, ranks)
        own_loop(rank, ranks)


@pytest.mark.support("megatron", "prompt trees with learned positions, in hybrid models, in evaluation; CP 3")
def test_other_models_and_loops_equal_one_rank_and_different_trees_are_told_of() -> None:
    run_ranks(3, each, timeout=120)
