"""Forms of checkpointing give the bits of none, with adapters too; tiles the gradients of one process."""

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
from tests.huggingface.one_process import total_loss
from tests.support.close import assert_close
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import by_turns, run_each

TILES = 3


class Tiled(torch.nn.Module):
    """A causal language model that never has the logits, nor the inner activations of an MLP, of more than a tile."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.mlp.forward = self._tiled(layer.mlp)

    @staticmethod
    def _tiled(mlp: Any) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        whole = type(mlp).forward
        parameters = list(mlp.parameters())
        return lambda x: TiledMLP.apply(whole, mlp, x, TILES, parameters)

    def forward(self, batch: dict[str, torch.Tensor], group: Any, own_loss: bool) -> torch.Tensor:
        """The loss of the whole batch, of `loss_tile` or of `tiled_loss`."""
        if own_loss:
            loss: torch.Tensor = self.model(**batch).loss
            return loss
        hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
        return dfa_ds.tiled_loss(self.model.lm_head, hidden, batch["labels"], group=group, tile=7)


def tiled(rank: int, world_size: int) -> None:
    """DeepSpeed's other means for long sequences work beside ours: its tiled MLP, and the loss by tiles."""
    from deepspeed.utils import safe_get_full_grad

    harness.prepare_worker(rank)
    wholes = [text(2, 10 * world_size, seed=seed, unlabelled=11 + seed) for seed in range(2)]
    for tied, stage in ((False, 1), (True, 3)):
        alone = build("Llama", tie_word_embeddings=tied)
        want_loss = torch.stack(
            [total / count for _, total, count in (total_loss(alone, each) for each in wholes)]
        ).mean()
        want_loss.backward()
        want = gradients(alone)
        model = Tiled(build("Llama", tie_word_embeddings=tied))
        config = harness.settings(stage, world_size, checkpoint="remat", loss_tile=7)
        config |= {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
        engine = harness.engine_of(config, model)
        group = dfa_ds.mesh_of(engine).group
        for own_loss in (False, True):
            losses = []
            for whole in wholes:
                COUNTERS.reset()
                loss = engine(whole, group, own_loss)
                engine.backward(loss)
                counts = COUNTERS.snapshot()
                assert counts["attention_forwards"] == counts["reused"] == LAYERS
                losses.append(harness.mean_over_ranks(loss))
                if whole is wholes[-1]:
                    for name, parameter in engine.module.model.named_parameters():
                        gradient = safe_get_full_grad(parameter).view_as(want[name])
                        assert_close(gradient, want[name], tolerance=1e-5, name=f"ZeRO {stage}, {name}")
                engine.step()
            assert sum(losses) / 2 == pytest.approx(want_loss.item(), rel=1e-5)
        engine.destroy()


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

    engine = harness.engine_of(harness.settings(stage, world_size, **block), model := make())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    batch = text(1, 10 * world_size, seed=5)
    for _ in range(2):
        COUNTERS.reset()
        engine.backward(engine(**batch).loss)
        counts = COUNTERS.snapshot()
        gradients = [safe_get_full_grad(parameter) for parameter in trained]
        engine.step()
    engine.destroy()
    return gradients, counts


def forms(rank: int, world_size: int) -> None:
    harness.prepare_worker(rank)
    for make, names in ((functools.partial(build, "Qwen3"), [*FORMS]), (adapted, WITH_ADAPTERS)):
        want, plain = two_steps(make, 3, world_size, {})
        assert plain["attention_forwards"] == LAYERS
        assert all(bool(gradient.any()) for gradient in want)
        for name in by_turns(names):
            with moves() as moved:
                got, counts = two_steps(make, 3, world_size, block := FORMS[name])
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
            once = block["checkpoint"] == "remat"
            for count in ("attention_forwards", "kernel_forwards", "forward_messages", "forward_bytes"):
                assert counts[count] == plain[count] * (1 if once else 2), name
            assert counts["reused"] == (LAYERS if once else 0), name
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


@pytest.mark.support("deepspeed", "ALST's tiled MLP, and the loss by tiles, as option and function")
@pytest.mark.support("deepspeed", "every form of checkpointing, to the bit; with PEFT")
@pytest.mark.support("deepspeed", "rematerialization under ZeRO 3")
def test_tiles_have_the_gradients_of_one_process_and_every_form_the_same_bits_and_remat_runs_attention_once() -> None:
    run_each(2, drop_in, tiled, forms, timeout=170)
