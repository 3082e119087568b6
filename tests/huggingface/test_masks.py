"""Any mask, as eager attention with the same mask in memory: windows count positions, experts count packed tokens."""

from __future__ import annotations

import inspect
import random
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dfa_megatron import huggingface as dfa_hf
from dfa_megatron import masks
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.masks import Mask, Span, Tile
from tests.huggingface.compared import assert_gradients, assert_loss
from tests.huggingface.test_parity import MODELS
from tests.huggingface.test_router_loss import EXPERTS
from tests.support.models import build, gradients, text
from tests.support.plan_cases import heterogeneous_masks
from tests.support.workers import run_ranks


def two_streams(half: int, block: int) -> Mask:
    """Block diffusion: noisy blocks see themselves and the clean blocks before; clean ones are causal by blocks."""
    tiles = list[Tile]()
    for lo in range(0, half, block):
        hi = min(lo + block, half)
        noisy, before, clean = Span(lo, hi), Span(half, half + lo), Span(half + lo, half + hi)
        tiles += [Tile(noisy, noisy), Tile(noisy, before), Tile(clean, Span(half, half + hi))]
    return masks.union(f"two streams {block}", 2 * half, tiles)


def of_cells(mask: Mask) -> torch.Tensor:
    """Which query sees which key, (length, length)."""
    difference = torch.arange(mask.length) - torch.arange(mask.length)[:, None]
    seen = torch.zeros(mask.length, mask.length, dtype=torch.bool)
    for q, kv, lo, hi in mask.tiles:
        part = difference[q.lo : q.hi, kv.lo : kv.hi]
        seen[q.lo : q.hi, kv.lo : kv.hi] |= (part >= lo) & (part <= hi)
    return seen


def in_memory(model: Any, batch: dict[str, torch.Tensor], mask: Mask, positions: torch.Tensor) -> torch.Tensor:
    """The mean loss of eager attention with this mask, and in layers with a window with its part that is near."""
    seen, window = of_cells(mask), getattr(model.config, "sliding_window", None)
    distance = positions[:, None] - positions
    near = seen if window is None else seen & (distance < window)
    added = {
        kind: torch.zeros(cells.shape, dtype=model.dtype).masked_fill(~cells, -1e30)[None, None]
        for kind, cells in (("full_attention", seen), ("sliding_attention", near))
    }
    both = added if hasattr(model.config, "layer_types") else added["sliding_attention"]
    given = {"input_ids": batch["input_ids"], "attention_mask": both, "position_ids": positions[None]}
    routed = getattr(model.config, "output_router_logits", False)
    found = model.model(**given, output_router_logits=True) if routed else model(**given)
    logits = model.lm_head(found.last_hidden_state) if routed else found.logits
    loss = F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])
    if routed:
        balance = vars(sys.modules[type(model).__module__])["load_balancing_loss_func"]
        loss = loss + 0.7 * inspect.unwrap(balance)(found.router_logits, 4, 2)
    return loss


def compare(rank: int, ranks: int) -> None:
    length, rng = 12 * ranks + 2, random.Random(ranks)
    whole, streams = torch.arange(length), torch.arange(length) % (length // 2)
    lengths = [7, length - 7]
    documents = torch.cat([torch.arange(each) for each in lengths])
    some = [case.mask for case in heterogeneous_masks(length, rng) if case.dense.diagonal().all()]
    router = {"router_aux_loss_coef": 0.7, "output_router_logits": True, "num_experts_per_tok": 2, **EXPERTS}
    for number, (kind, changes, mask, positions) in enumerate(
        (
            ("Qwen3", {}, two_streams(length // 2, 4), streams),
            (*MODELS["gemma2-capped-scores"], two_streams(length // 2, 3), streams),
            (*MODELS["mistral-window"], masks.block_causal_documents(lengths, 4), documents),
            (*MODELS["gemma2-capped-scores"], masks.prefix_lm(length, length // 2), whole),
            ("Mixtral", router, masks.prompt_tree([4, 8, length - 12], [-1, 0, 0]), masks_positions(4, 8, length)),
            *(("Llama", {}, mask, whole) for mask in rng.sample(some, 2)),
        )
    ):
        batch = text(1, length, seed=number)
        want, model = (build(kind, **changes).double() for _ in range(2))
        loss = in_memory(want, batch, mask, positions)
        loss.backward()
        dfa_hf.distribute_attention(model)
        given = batch | {"mask": mask} | ({} if positions is whole else {"position_ids": positions[None]})
        got = model(**given).loss
        got.backward()
        name = f"{kind} {mask.name}"
        assert_loss(got, loss, name)
        assert_gradients(model, gradients(want), name, 1e-6)


def masks_positions(prompt: int, answer: int, length: int) -> torch.Tensor:
    return torch.cat((torch.arange(prompt + answer), torch.arange(prompt, length - answer)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_loss_and_gradients_are_those_of_the_mask_in_memory(ranks: int) -> None:
    run_ranks(ranks, compare, timeout=120)


def test_masks_beside_padding_and_for_layers_with_states_are_refused() -> None:
    model, batch = dfa_hf.distribute_attention(build("Llama")), text(1, 8, seed=0) | {"mask": masks.prefix_lm(8, 3)}
    padding = (torch.arange(8) < 6).long()[None]
    with pytest.raises(UnsupportedError, match="a mask beside padding"):
        model(**batch | {"attention_mask": padding, "labels": batch["labels"].where(padding.bool(), -100)})
    rows = {name: x.expand(2, -1) for name, x in batch.items() if name != "mask"}
    with pytest.raises(UnsupportedError, match="the same in all rows of a mask"):
        model(**batch | rows | {"position_ids": torch.stack((torch.arange(8), torch.arange(8) % 4))})
    states = dfa_hf.distribute_attention(build("Mamba2", num_heads=4, head_dim=16, state_size=4, n_groups=1))
    with pytest.raises(UnsupportedError, match="with a state"):
        states(**batch)
