"""Every form of checkpointing gives the bits of none, and with remat runs attention once; with adapters (PEFT) too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron import dist_flash_attn_func
from dfa_megatron.remat import saved
from dfa_megatron.runtime.counters import COUNTERS
from tests.deepspeed import harness
from tests.support.models import LAYERS, build, text
from tests.support.workers import run_ranks

FORMS: dict[str, dict[str, Any]] = {
    "remat": {"checkpoint": "remat"},
    "full": {"checkpoint": "full"},
    "re-entrant remat": {"checkpoint": "remat", "reentrant": True},
    "re-entrant full": {"checkpoint": "full", "reentrant": True},
    "all on the host": {"checkpoint": "remat", "remat_offload": True},
    "inputs on the host": {"checkpoint": "full", "remat_offload": True},
}
WITH_ADAPTERS = ("remat", "re-entrant remat", "re-entrant full")


def adapted() -> Any:
    """LoRA: the weights and the embeddings are frozen."""
    from peft import LoraConfig, get_peft_model

    model = build("Llama")
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(model, config)


@contextlib.contextmanager
def moves() -> Iterator[list[Any]]:
    """Give a list of what is moved to the host meanwhile."""
    moved: list[Any] = []
    to_host = saved._Lane.to_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved._Lane, "to_host", lambda self, tensors: moved.append(tensors) or to_host(self, tensors))
        yield moved


def two_steps(make: Any, stage: int, world_size: int, block: dict[str, Any]) -> tuple[Any, Any]:
    """Gradients and counts of the second micro-batch, in which ZeRO-3's gathers have found their order."""
    from deepspeed.utils import safe_get_full_grad

    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = harness.settings(stage, world_size, **block)
    engine, *_ = dfa_ds.initialize(model=model, model_parameters=trained, config=config)
    batch = text(1, 10 * world_size, seed=5)
    for _ in range(2):
        COUNTERS.reset()
        engine.backward(engine(**batch).loss)
        counts = COUNTERS.snapshot()
        gradients = [safe_get_full_grad(parameter) for parameter in trained]
        engine.step()
    engine.destroy()
    return gradients, counts


def forms(rank: int, world_size: int, stage: int, peft: bool) -> None:
    harness.prepare_worker(rank)
    make = adapted if peft else functools.partial(build, "Qwen3")
    want, plain = two_steps(make, stage, world_size, {})
    assert plain["attention_forwards"] == LAYERS
    assert all(bool(gradient.any()) for gradient in want)
    for name, block in FORMS.items():
        if peft and name not in WITH_ADAPTERS:
            continue
        with moves() as moved:
            got, counts = two_steps(make, stage, world_size, block)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
        once = block["checkpoint"] == "remat"
        for count in ("attention_forwards", "kernel_forwards", "forward_messages", "forward_bytes"):
            assert counts[count] == plain[count] * (1 if once else 2), name
        assert counts["replays"] == (LAYERS if once else 0), name
        each = 1 + once if "remat_offload" in block else 0  # of two micro-batches: each input, each attention
        assert len(moved) == 2 * LAYERS * each, name


def drop_in(rank: int, world_size: int) -> None:
    import deepspeed
    from deepspeed.runtime.activation_checkpointing import checkpointing

    harness.prepare_worker(rank)
    deepspeed.init_distributed()
    weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(rank))

    def region(x: torch.Tensor, *, weight: torch.Tensor, bias: None = None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)) for t in (x @ weight).chunk(3, -1))
        return dist_flash_attn_func(q, k, v, causal=True).flatten(2).sin()

    found = []
    for function, forwards in ((checkpointing.checkpoint, 2), (dfa_ds.checkpoint, 1)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        COUNTERS.reset()
        function(region, leaves[0], weight=leaves[1], bias=None).square().sum().backward()
        assert COUNTERS.snapshot()["attention_forwards"] == forwards
        found.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert torch.equal(dfa_ds.checkpoint(region, x, weight=weight), region(x, weight=weight))


def each(rank: int, world_size: int) -> None:
    drop_in(rank, world_size)
    for peft in (False, True):
        forms(rank, world_size, 3, peft)


@pytest.mark.support("deepspeed", "every form of checkpointing, to the bit; with PEFT")
@pytest.mark.support("deepspeed", "rematerialization under ZeRO 3")
def test_every_form_has_the_same_bits_and_remat_runs_attention_once() -> None:
    run_ranks(2, each, timeout=170)
