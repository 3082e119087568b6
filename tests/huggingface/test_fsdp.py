"""FSDP2 over a mesh (dp x cp), as the example does it, trains as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.close import assert_close
from tests.support.models import build, gradients, text
from tests.support.workers import run_ranks

TOLERANCE = 1e-6
"""transformers computes its loss in float32, whatever the model's dtype."""


def batch_of(step: int, micro: int, data: int, length: int) -> dict[str, torch.Tensor]:
    """A micro-batch with a number of labels of its own."""
    return text(1 + micro, length, seed=100 * step + 10 * micro + data, unlabelled=(5 * micro + 7 * data) % length)


def one_process(model: Any, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The summed loss of all labelled tokens, over their number."""
    sums, count = [], 0
    for batch in batches:
        labels = batch["labels"][:, 1:]
        scores = model(input_ids=batch["input_ids"]).logits[:, :-1]
        sums.append(torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"))
        count += int((labels != -100).sum())
    return torch.stack(sums).sum() / count


def compare(rank: int, world_size: int, context: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import fsdp2 as example
    from dfa_megatron import TrainingConfig
    from dfa_megatron import huggingface as dfa_hf

    del rank
    torch.set_default_dtype(torch.float64)
    data = world_size // context
    mesh = init_device_mesh("cpu", (data, context), mesh_dim_names=("dp", "cp"))
    mine, length = mesh["dp"].get_local_rank(), 6 * context

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model, ranks = build("Llama").double(), mesh["dp", "cp"]._flatten("dp_cp")
        dfa_hf.distribute_attention(model, group=mesh["cp"].get_group(), config=TrainingConfig(checkpoint="remat"))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=ranks)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    reference = build("Llama").double()
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    model, optimizer = fresh()
    for step in range(3):
        if step == 2:  # a new start in the middle of the data
            parameters, moments = get_state_dict(model, optimizer)
            model, optimizer = fresh()
            set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
        batches = [[batch_of(step, micro, each, length) for micro in range(2)] for each in range(data)]
        want = one_process(reference, [batch for of_rank in batches for batch in of_rank])
        want.backward()
        got = example.gradients(model, batches[mine], mesh)
        assert_close(got, want, tolerance=TOLERANCE, name=f"loss of step {step}")
        parameters = dict(model.named_parameters())
        for name, wanted in gradients(reference).items():
            gradient = parameters[name].grad
            assert isinstance(gradient, DTensor)
            assert_close(gradient.full_tensor(), wanted, tolerance=TOLERANCE, name=f"{name} of step {step}")
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()

    batches = [[text(1 + each, 2 * context * k, seed=k + each, unlabelled=k) for k in (1, 5)] for each in range(data)]
    want = one_process(reference, [batch for of_rank in batches for batch in of_rank])
    assert_close(example.gradients(model, batches[mine], mesh), want, tolerance=TOLERANCE, name="other lengths")


@pytest.mark.parametrize(("ranks", "context"), [(4, 2), (3, 3)])
def test_accumulation_and_resume_of_fsdp2_are_those_of_one_process(ranks: int, context: int) -> None:
    run_ranks(ranks, compare, context, timeout=120)
