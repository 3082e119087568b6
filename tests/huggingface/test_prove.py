"""`prove` finds what is planted, in float32 and bfloat16, finds nothing where nothing is, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import DisagreementError, ProofError, UnsupportedError
from dfa_megatron.huggingface import attention_function
from dfa_megatron.huggingface.current_forward import CONTEXT
from dfa_megatron.kernels.adapters.cpu import CpuKernel
from dfa_megatron.sharding import shard_sequence
from tests.huggingface.sweep.images import DELTA
from tests.huggingface.test_foreign_code import shifted
from tests.huggingface.test_trainer import prepare_worker
from tests.support.models import build, text
from tests.support.plants import (
    a_kernel_ignores_the_window,
    attention_with,
    documents_lost,
    states_dropped,
    the_backward_has_stale_keys,
)
from tests.support.workers import by_turns, run_each, run_ranks

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, **DELTA}


def made(kind: str = "Mistral", dtype: str = "float32", **changes: Any) -> Any:
    changes = {"sliding_window": 10, **changes} if kind == "Mistral" else changes
    model = build(kind, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(1)
            if name.endswith("A_log"):
                parameter.sub_(2)
    return model.to(getattr(torch, dtype))


@contextmanager
def _batches_with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    from dfa_megatron.huggingface import decoder_door

    real = decoder_door.for_model

    def other(model: Any, given: dict[str, Any], rows: Any) -> Any:
        part = shard_sequence(given["input_ids"], group=getattr(model, CONTEXT).group)
        return real(model, {**given, **change({**given, "input_ids": part})}, rows)

    with patch.object(decoder_door, "for_model", other):
        yield


def _forward_of(module: Any, forward: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Give a module the class of a user, with a forward of its own: `forward(real, self, *args)`."""
    real = type(module).forward
    own = {"forward": lambda self, *args, **kwargs: forward(real, self, *args, **kwargs)}
    module.__class__ = type("Own", (type(module),), own)
    return nullcontext()


def mixed_tokens(model: Any) -> Any:
    return _forward_of(model.model.layers[1].mlp, lambda real, self, x: real(self, shifted(x)))


def local_rope(model: Any) -> Any:
    return _forward_of(
        model.model.rotary_emb, lambda real, self, x, position_ids: real(self, x, position_ids - position_ids.min())
    )


def wrong_scale(model: Any) -> Any:
    return attention_with(attention_function, softmax_scale=0.25)


def lost_window(model: Any) -> Any:
    return attention_with(attention_function, window_size=(-1, -1))


def labels_of_chunks(model: Any) -> Any:
    def change(given: dict[str, Any]) -> dict[str, Any]:
        labels = torch.where(given["shift_labels"] == -100, -100, given["input_ids"].roll(-1, 1))
        return {"shift_labels": labels}

    return _batches_with(change)


def mean_of_ranks(model: Any) -> Any:
    return _batches_with(lambda batch: {"num_items_in_batch": (batch["shift_labels"] != -100).sum()})


def lost_documents(model: Any) -> Any:
    return documents_lost(attention_function)


@contextmanager
def _in_the_kernel(plant: Callable[[], None]) -> Iterator[None]:
    with patch.multiple(CpuKernel, forward=CpuKernel.forward, backward=CpuKernel.backward):
        plant()
        yield


def lost_window_of_kernel(model: Any) -> Any:
    return _in_the_kernel(a_kernel_ignores_the_window)


def stale_keys(model: Any) -> Any:
    return _in_the_kernel(the_backward_has_stale_keys)


FOUND = {
    mixed_tokens: "a sequence, 96 tokens, output of layers: model.layers.1.mlp on rank 1, token 48:",
    local_rope: "a sequence, 96 tokens, output of layers: model.layers.0.self_attn on rank 1, token",
    wrong_scale: "a sequence, 96 tokens, output of layers: model.layers.0.self_attn on rank 0, token",
    lost_window: "a sequence, 96 tokens, output of layers: model.layers.0.self_attn on rank 0, token 1",
    labels_of_chunks: "a sequence, 96 tokens, gradient at layers: model.layers.1 on rank 0, token 47:",
    mean_of_ranks: "a sequence, 96 tokens,",
    lost_documents: "a pack of 3, 96 tokens, output of layers: model.layers.0.self_attn on rank 0, token 32:",
    lost_window_of_kernel: "output of layers: model.layers.0.self_attn on rank 0, token 1",
    stale_keys: "gradient at layers: model.layers.",
}
"""Each fault, and what is said of it."""


LENGTHS = {lost_window_of_kernel: 100, stale_keys: 200}
"""Of texts: from the third run of a length on, kernels are replayed as they were recorded."""


def said_of(model: Any, fault: Callable[[Any], Any]) -> str:
    dfa_hf.distribute_attention(model)
    with fault(model):
        try:
            return str(dfa_hf.prove(model, tokens=LENGTHS.get(fault)))
        except ProofError as error:
            return str(error)


IN_BFLOAT16 = (wrong_scale, lost_window, labels_of_chunks, mean_of_ranks, stale_keys)


def with_each_fault(rank: int, world_size: int) -> list[tuple[Callable[[Any], Any], str]]:
    """The fault is planted after attention was distributed, which would refuse some of them."""
    planted = [(fault, said_of(made(), fault)) for fault in FOUND]
    return planted + [(fault, said_of(made(dtype="bfloat16"), fault)) for fault in by_turns(IN_BFLOAT16)]


def test_every_planted_fault_is_found_where_it_is_alike_on_every_rank() -> None:
    one, other = run_ranks(2, with_each_fault, timeout=120)
    assert one == other
    for fault, said in one:
        assert FOUND[fault] in said.partition("first difference: ")[2], f"{fault.__name__}\n{said}"


def nothing_planted(rank: int, world_size: int) -> dict[str, str]:
    prepare_worker(rank, world_size)
    from torch.distributed.fsdp import fully_shard

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "experts in bf16": ("Qwen3Moe", {**EXPERTS, "dtype": "bfloat16"}), "a hybrid": ("Qwen3Next", HYBRID),
        "remat, dropout, 10 tokens": ("Phi3", {"resid_pdrop": 0.3}), "ddp": ("Llama", {}),
        "fsdp2": ("Llama", {"dtype": "bfloat16"}), "peft": ("Llama", {}),
    }  # fmt: skip
    found = {}
    for name, (kind, changes) in cases.items():
        model = made(kind, **changes)
        if name == "peft":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        remat = "remat" if "remat" in name else "none"
        dfa_hf.distribute_attention(model, config=TrainingConfig(checkpoint=remat))
        if name == "fsdp2":
            for layer in (*model.model.layers, model):
                fully_shard(layer)
        if name == "ddp":
            model = DistributedDataParallel(model)
        found[name] = str(dfa_hf.prove(model, tokens=10 if "10" in name else None))
    return {**found, "accelerate": str(dfa_hf.prove(of_accelerate()))}


def of_accelerate() -> Any:
    """A model that cuts whole batches itself."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), made()
    dfa_hf.distribute_accelerator(accelerator, model)
    return accelerator.prepare(model)


def test_where_nothing_is_wrong_nothing_is_found_in_any_wrapper() -> None:
    for found in run_ranks(2, nothing_planted, timeout=120):
        for name, table in found.items():
            assert "differs" not in table, f"{name}\n{table}"
            rows = [line for line in table.splitlines() if "tokens  " in line]
            assert len(rows) == 8, table
            assert "2 ranks compute what one rank computes" in table
        assert "a sequence, 12 tokens" in found["remat, dropout, 10 tokens"]


def faults_of_ranks(rank: int, world_size: int) -> None:
    model = dfa_hf.distribute_attention(made("Qwen3Next", **HYBRID))
    with (
        states_dropped(),
        pytest.raises(ProofError, match=r"first difference: .*layers.0.linear_attn on rank 1, token 48:"),
    ):
        dfa_hf.prove(model)
    other = {"config": TrainingConfig(schedule="ring")} if rank == 1 else {}
    with attention_with(attention_function, **other), pytest.raises(DisagreementError, match="schedule"):
        dfa_hf.prove(dfa_hf.distribute_attention(made()), tokens=70)  # a length of which nobody keeps a plan


def unreduced(rank: int, world_size: int) -> str:
    """DDP that averages nothing."""
    model = DistributedDataParallel(dfa_hf.distribute_attention(made()))
    with pytest.raises(ProofError) as caught, model.no_sync():
        dfa_hf.prove(model)
    return str(caught.value)


def keeps_everything(rank: int, world_size: int) -> None:
    """And a model that was trained before goes on as if nothing had been."""
    model = dfa_hf.distribute_attention(made("Phi3", resid_pdrop=0.3))
    model.model.register_buffer("count", torch.zeros(()))
    model.model.register_forward_hook(lambda module, args, output: module.count.add_(1) and None)
    model(**text(1, 16, seed=1)).loss.backward()
    model.model.norm.eval()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    gradients = {name: (x.grad, x.grad.clone()) for name, x in model.named_parameters()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    dfa_hf.prove(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(x.grad is gradients[n][0] and torch.equal(*gradients[n]) for n, x in model.named_parameters())
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(state, torch.get_rng_state())
    assert model.model.layers[0].resid_attn_dropout.p == 0.3
    with pytest.raises(UnsupportedError, match="its attention is not distributed"):
        dfa_hf.prove(made())


def test_a_proof_changes_nothing_and_finds_dropped_states_another_plan_and_gradients_that_nobody_averaged() -> None:
    _, said, _ = run_each(2, keeps_everything, unreduced, faults_of_ranks, timeout=120)
    assert said[0] == said[1]
    assert "first difference: a sequence, 96 tokens, gradient of parameters: " in said[0], said[0]


def on_three(rank: int, world_size: int) -> list[str]:
    """Two groups of ranks that share, or one of three."""
    mesh = None if world_size == 3 else dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group = None if mesh is None else mesh["cp"].get_group()
    model = dfa_hf.distribute_attention(made(), group=group)
    clean = str(dfa_hf.prove(DistributedDataParallel(model)))
    with labels_of_chunks(model), pytest.raises(ProofError) as caught:
        dfa_hf.prove(DistributedDataParallel(model))
    return [clean, str(caught.value)]


@pytest.mark.parametrize("ranks", by_turns([3, 4]))
def test_odd_ranks_and_several_groups_are_proved(ranks: int) -> None:
    for clean, faulty in run_ranks(ranks, on_three, timeout=120):
        assert "ranks compute what one rank computes" in clean
        assert "gradient at layers: model.layers.1 on rank" in faulty.partition("first difference: ")[2]
