"""DeepSpeed's other means for long sequences work beside ours: its data loader, tiled MLP and tiled loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.runtime.counters import COUNTERS
from tests.deepspeed import harness
from tests.huggingface.one_process import total_loss
from tests.support.close import assert_close
from tests.support.models import LAYERS, build, gradients, text
from tests.support.workers import run_ranks

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


def tiled(rank: int, world_size: int, tied: bool) -> None:
    from deepspeed.utils import safe_get_full_grad

    harness.prepare_worker(rank)
    wholes = [text(2, 10 * world_size, seed=seed, unlabelled=11 + seed) for seed in range(2)]
    alone = build("Llama", tie_word_embeddings=tied)
    want_loss = torch.stack([total / count for _, total, count in (total_loss(alone, each) for each in wholes)]).mean()
    want_loss.backward()
    want = gradients(alone)
    for stage in (3,) if tied else (1,):
        model = Tiled(build("Llama", tie_word_embeddings=tied))
        config = harness.settings(stage, world_size, checkpoint="remat", loss_tile=7)
        config |= {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
        engine, *_ = dfa_ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        group = dfa_ds.mesh_of(engine).group
        for own_loss in (False, True):
            losses = []
            for whole in wholes:
                COUNTERS.reset()
                loss = engine(whole, group, own_loss)
                engine.backward(loss)
                counts = COUNTERS.snapshot()
                assert counts["attention_forwards"] == counts["replays"] == LAYERS
                losses.append(harness.mean_over_ranks(loss))
                if whole is wholes[-1]:
                    for name, parameter in engine.module.model.named_parameters():
                        gradient = safe_get_full_grad(parameter).view_as(want[name])
                        assert_close(gradient, want[name], tolerance=1e-5, name=f"ZeRO {stage}, {name}")
                engine.step()
            assert sum(losses) / 2 == pytest.approx(want_loss.item(), rel=1e-5)
        engine.destroy()


def each(rank: int, world_size: int) -> None:
    for tied in (False, True):
        tiled(rank, world_size, tied)


@pytest.mark.support("deepspeed", "ALST's tiled MLP, and the loss by tiles, as option and function")
def test_tiled_mlp_and_tiled_loss_have_the_gradients_of_one_process() -> None:
    run_ranks(2, each, timeout=170)
