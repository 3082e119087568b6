"""A Megatron model whose loss goes by tiles trains like one rank, and never has the logits of more than a tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.megatron import harness
from tests.megatron.harness import BATCH, SEQUENCE, Case, Topology
from tests.support.workers import run_ranks

TILE = 7
PREDICTION = (("mtp_num_layers", 2), ("sequence_parallel", False))


def tiled(**changes: Any) -> Case:
    return Case(MegatronConfig(data_layout="contiguous", loss_tile=TILE), steps=1, **changes)


def forbid_all_logits() -> list[int]:
    """Return the numbers of labels whose losses are made by tiles from now on."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    from dfa_megatron.loss.deferred import DeferredLogits

    megatrons, losses = ColumnParallelLinear.forward, DeferredLogits.losses
    made: list[int] = []

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert "forward" not in vars(self), "the logits of all tokens"
        return megatrons(self, *args, **kwargs)

    def counted(self: Any, labels: torch.Tensor, **given: Any) -> torch.Tensor:
        made.append(labels.numel())
        return losses(self, labels, **given)

    ColumnParallelLinear.forward, DeferredLogits.losses = forward, counted  # type: ignore[method-assign]
    return made


def check(rank: int, world_size: int, cases: list[tuple[Topology, Case, dict[str, int], str]]) -> None:
    made = forbid_all_logits()
    harness.check_topologies(rank, world_size, cases)
    last = [topology.pp == 1 or rank == world_size - 1 for topology, *_ in cases]
    heads = 3 if cases[0][1].config == PREDICTION else 1
    assert made == [BATCH * SEQUENCE // cases[0][0].cp] * harness.MICRO_BATCHES * heads * sum(last)


@pytest.mark.support("megatron", "loss by tiles; TP 2 with and without sequence parallelism, CP 3, PP 2, MTP")
def test_loss_by_tiles_trains_like_one_rank(reference: str, tmp_path: Path) -> None:
    predicted = str(tmp_path / "predicted.pt")
    run_ranks(1, harness.save_references, [(predicted, Case(options=None, steps=1, config=PREDICTION[:1]))])
    alone = tiled(config=(("sequence_parallel", False),))
    pair = Topology(tp=2)
    by_ranks = {
        2: [(pair, tiled(), reference), (pair, alone, reference), (Topology(pp=2), tiled(), reference)],
        3: [(Topology(cp=3), tiled(recompute=("uniform", 1)), reference)],
        4: [(Topology(tp=2, cp=2), tiled(config=PREDICTION), predicted)],
    }  # fmt: skip
    for ranks, cases in by_ranks.items():
        run_ranks(ranks, check, [(topology, wanted, {}, path) for topology, wanted, path in cases], timeout=170)


def scores(rank: int, world_size: int) -> None:
    """Log-probabilities and entropy of a tied model, and all its gradients, beside those of its own logits."""
    from dfa_megatron.loss import by_document, scores_of

    harness.start(Topology(cp=world_size))
    found = []
    for tile in (TILE, "off"):
        options = MegatronConfig(data_layout="contiguous", loss_tile=tile)
        config = harness.make_config(Topology(cp=world_size), Case(options))
        model = tied(config, options)
        batch = next(harness.batches(Case(options), 0))
        labels = batch.pop("labels")
        if tile == "off":
            with (
                pytest.raises(UnsupportedError, match="scores_of a GPTModel with 0 losses made by tiles"),
                scores_of(model),
            ):
                pass
            logp = model(**batch).log_softmax(-1)
            logprobs = logp.gather(-1, labels[..., None])[..., 0]
            entropy = -(logp.exp() * logp).sum(-1)
        else:
            with scores_of(model) as seen:
                losses = model(**batch, labels=labels)
            logprobs, entropy = seen.logprobs, seen.entropy
            assert logprobs.shape == entropy.shape == labels.shape
            assert torch.equal(losses, -logprobs)
            assert model(**batch).shape == (BATCH, SEQUENCE // world_size, harness.VOCABULARY)
        (logprobs.sum() - 2 * entropy.sum()).backward()
        gradients = [p.grad for p in model.parameters()]
        for each in gradients:
            dist.all_reduce(each)
        found.append([*by_document(logprobs), *by_document(entropy, (0, 9, SEQUENCE)), *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def tied(config: Any, options: MegatronConfig) -> Any:
    from tests.support import megatron_model as small_model

    sizes = {"vocab_size": harness.VOCABULARY, "max_sequence_length": SEQUENCE, "position_embedding_type": "rope"}
    return small_model.build_chunk(config, options, None, 0.05, share_embeddings_and_output_weights=True, **sizes)


def test_scores_are_those_of_logits() -> None:
    run_ranks(2, scores, timeout=120)
