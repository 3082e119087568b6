"""Loss, log-probabilities and entropy by tiles are those of dense logits, in float64, and no tensor exceeds a tile."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.memory_account import HeadMemory, head_bytes
from dfa_megatron import shard_sequence
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.layouts import Layout, of_lengths
from dfa_megatron.loss import Head, by_document, cross_entropy, tiled, token_scores
from dfa_megatron.loss.tiled import Tiling, best
from tests.support.arguments import assert_refused
from tests.support.live_bytes import LiveBytes
from tests.support.workers import over_ranks

HIDDEN, VOCABULARY, TOKENS = 6, 23, 30


def drawn(tokens: int = TOKENS, vocabulary: int = VOCABULARY, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return fresh hidden states, weight, bias and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(tokens * vocabulary)
    shapes = (tokens, HIDDEN), (vocabulary, HIDDEN), (vocabulary,)
    made = [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::4] = -100
    return [*made, labels]


def dense(hidden: Any, weight: Any, bias: Any, scale: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    logits: torch.Tensor = F.linear(hidden, weight, bias) * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def compare(got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Compare a result and the gradients of a random sum of it."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    weights = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.autograd.grad((x * weights).sum(), inputs, retain_graph=True) for x in (got, want))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def z_lost(logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, factor: float) -> torch.Tensor:
    return losses + factor * torch.where(labels == -100, 0, torch.logsumexp(logits, -1).square())


def test_the_loss_is_that_of_dense_logits_with_every_option() -> None:
    (hidden, weight, bias, labels), tiles = drawn(), itertools.cycle((1, 7, 10, 100, 13))
    options = itertools.product(("none", "sum", "mean"), (0.0, 0.1), (0.0, 0.01), ({}, {"scale": 0.3, "softcap": 2.0}))
    for reduction, smoothing, z_loss, shape in options:
        logits = dense(hidden, weight, bias, **shape)
        each = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        each = z_lost(logits, labels, each, z_loss)
        want = {"none": each, "sum": each.sum(), "mean": each.sum() / (labels != -100).sum()}[reduction]
        got = cross_entropy(
            hidden, Head(weight=weight, bias=bias, **shape), labels, tile=next(tiles), reduction=reduction,
            label_smoothing=smoothing, z_loss=z_loss,
        )  # fmt: skip
        compare(got, want, [hidden, weight, bias])


def test_log_probabilities_and_entropy_are_those_of_dense_logits() -> None:
    hidden, weight, bias, labels = drawn()
    for shape in ({}, {"scale": 2.0, "softcap": 1.5}):
        logp = dense(hidden, weight, bias, **shape).log_softmax(-1)
        picked = torch.where(labels == -100, 0, logp.gather(1, labels.clamp(min=0)[:, None])[:, 0])
        want = torch.stack([picked, -(logp.exp() * logp).sum(-1)])
        head = Head(weight=weight, bias=bias, **shape)
        got = token_scores(hidden.view(2, 15, -1), head, labels.view(2, 15), tile=7, entropy=True)
        assert got.logprobs.shape == (2, 15)
        compare(torch.stack([got.logprobs.flatten(), got.entropy.flatten()]), want, [hidden, weight, bias])


def test_without_a_label_the_loss_is_0_and_a_wrong_label_gives_nan() -> None:
    hidden, weight, _, labels = drawn()
    loss = cross_entropy(hidden, Head(weight=weight), torch.full_like(labels, -100), tile=8)
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()
    assert not weight.grad.any()
    labels[1] = VOCABULARY
    assert cross_entropy(hidden, Head(weight=weight), labels, tile=8).isnan()


def test_parts_of_any_lengths_sum_to_the_whole_with_weights_of_tokens() -> None:
    hidden, weight, bias, labels = drawn()
    head, weights = Head(weight=weight, bias=bias), torch.linspace(0, 2, TOKENS, dtype=torch.float64)
    each = F.cross_entropy(dense(hidden, weight, bias), labels, reduction="none")
    parts = [x.split((0, 7, 1, 0, 22)) for x in (hidden, labels, weights)]
    found = [
        (cross_entropy(mine, head, own, tile=4, reduction="none") * some).sum()
        for mine, own, some in zip(*parts, strict=True)
    ]
    compare(torch.stack(found).sum(), (each * weights).sum(), [hidden, weight, bias])
    assert [x.any().item() for x in torch.autograd.grad(found[0], [weight, bias])] == [False, False]


def test_a_tied_weight_gets_both_gradients() -> None:
    _, weight, _, labels = drawn()
    embedded = F.embedding(labels.clamp(min=0).roll(1), weight).sin()
    want = F.cross_entropy(embedded @ weight.T, labels)
    compare(cross_entropy(embedded, Head(weight=weight), labels, tile=4), want, [weight])


@pytest.mark.parametrize(
    "odd", [0, 0.0, -2.0, torch.tensor(2.0), torch.nn.Parameter(torch.ones(())), True, "2", float("nan")]
)
def test_factors_that_are_no_numbers_or_that_no_logit_survives_are_refused(odd: Any) -> None:
    hidden, weight, _, labels = drawn()
    for name in ("scale", "softcap"):
        if (name, odd) == ("scale", -2.0):
            continue
        with pytest.raises(UnsupportedError, match=f"a head with {name}="):
            Head(weight=weight, **{name: odd})
    for smoothing in (-0.1, 1.1):
        with pytest.raises(UnsupportedError, match="label_smoothing"):
            cross_entropy(hidden, Head(weight=weight), labels, label_smoothing=smoothing)


@pytest.mark.parametrize("tile", [0, -1, 2.0, True, "8", None])
def test_a_tile_that_is_no_number_of_tokens_is_refused(tile: Any) -> None:
    hidden, weight, _, labels = drawn()
    assert_refused("a tile is a number of tokens", token_scores, hidden, Head(weight=weight), labels, tile=tile)


def test_wrong_shapes_and_reductions_are_refused() -> None:
    hidden, weight, _, labels = drawn()
    assert_refused("labels of shape", cross_entropy, hidden, Head(weight=weight), labels[1:])
    assert_refused("mean", cross_entropy, hidden, Head(weight=weight), labels, reduction="means")
    assert_refused("it ends at 20, but the ranks hold 30 tokens", by_document, labels, (0, 20))


def test_weights_of_autocast_are_rounded_as_a_linear_layer_rounds_them() -> None:
    hidden, weight, bias, labels = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight, bias)
        got = cross_entropy(hidden, Head(weight=weight, bias=bias), labels, tile=8)
    assert logits.dtype == torch.bfloat16
    want = F.cross_entropy(logits.float(), labels)
    torch.testing.assert_close(got, want)
    ours, theirs = (torch.autograd.grad(loss, [hidden, weight]) for loss in (got, want))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_predicted_bytes_are_those_of_the_tensors_alive(dtype: torch.dtype, entropy: bool) -> None:
    tokens, vocabulary, tile = 60, 128 * 1024 + 3, 16
    hidden, weight, _, labels = drawn(tokens, vocabulary, dtype)
    with LiveBytes() as live:
        scores = token_scores(hidden, Head(weight=weight), labels, tile=tile, entropy=entropy)
        (scores.logprobs.sum() + (scores.entropy.sum() if entropy else 0)).backward()
    dense_scores = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="none")
    torch.testing.assert_close(scores.logprobs, -dense_scores)
    want = head_bytes(tokens, vocabulary, HIDDEN, tile, itemsize=dtype.itemsize, entropy=entropy)
    assert live.peak == pytest.approx(want.together, rel=0.02)
    largest = max(tile * vocabulary, weight.numel()) * 4
    assert live.largest == largest < tokens * vocabulary * dtype.itemsize


def test_the_page_of_the_loss_shows_the_predicted_bytes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "loss.md").read_text(encoding="utf-8")
    dense, tiled = (head_bytes(2**19, 32768, 4096, tile) for tile in (None, 4096))
    for name in HeadMemory.__slots__:
        assert f"| {getattr(dense, name) / 2**30:.2f} | {getattr(tiled, name) / 2**30:.2f} |" in page


@over_ranks(2, 3, timeout=120)
def test_a_vocabulary_cut_unevenly_over_ranks_gives_the_numbers_of_one(rank: int, world_size: int) -> None:
    group: Any = init_device_mesh("cpu", (world_size,))
    hidden, weight, bias, labels = drawn()
    partition = {2: (20, 3), 3: (5, 1, 17)}[world_size]
    mine = slice(sum(partition[:rank]), sum(partition[: rank + 1]))
    part = torch.split(hidden.detach(), TOKENS // world_size)[rank].clone().requires_grad_()
    for sequence_parallel, told, shape in itertools.product((False, True), (None, partition), ({}, {"softcap": 2.0})):
        logits = dense(hidden, weight, bias, **shape)
        logp = logits.log_softmax(-1)
        each = z_lost(logits, labels, F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.2), 0.1)
        want = each.sum() - (logp.exp() * logp).sum()
        ours = [part if sequence_parallel else hidden.detach().clone().requires_grad_()]
        ours += [x.detach()[mine].clone().requires_grad_() for x in (weight, bias)]
        head = Head(
            weight=ours[1], bias=ours[2], group=group, partition=told, sequence_parallel=sequence_parallel, **shape
        )
        got = cross_entropy(ours[0], head, labels, tile=7, reduction="sum", label_smoothing=0.2, z_loss=0.1)
        got = got + token_scores(ours[0], head, labels, tile=7, entropy=True).entropy.sum()
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        wanted = list(torch.autograd.grad(want, [hidden, weight, bias]))
        wanted[1:] = [x[mine] for x in wanted[1:]]
        if sequence_parallel:
            wanted[0] = torch.split(wanted[0], TOKENS // world_size)[rank]
        for one, other in zip(torch.autograd.grad(got, ours), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)
    with pytest.raises(UnsupportedError, match="a vocabulary cut into"):
        token_scores(hidden, Head(weight=weight, group=group, partition=partition), labels)
    for sequence_parallel in (False, True):  # a context-parallel rank without tokens: so has its tensor-parallel group
        ours = [x.detach().clone().requires_grad_() for x in (hidden[:0], weight[mine], bias[mine])]
        head = Head(weight=ours[1], bias=ours[2], group=group, sequence_parallel=sequence_parallel)
        scores = token_scores(ours[0], head, labels[:0], entropy=True)
        total = cross_entropy(ours[0], head, labels[:0], z_loss=0.1) + scores.logprobs.sum() + scores.entropy.sum()
        assert total == 0
        assert not any(x.any() for x in torch.autograd.grad(total, ours))
        assert [len(x) for x in best(*ours, Tiling(head, 7, 0, entropy=False, total=False))] == [0, 0]
    parts = of_lengths([0, *[1] * (world_size - 2), 13 - (world_size - 2)])
    for layout, offsets in itertools.product(("contiguous", "zigzag", parts), ((0, 13), (0, 1, 8, 13))):
        gathers(layout, offsets)


@over_ranks(2, 3)
def test_ranks_that_ask_for_different_losses_are_told_and_where_nobody_looks_it_is_nan(rank: int, ranks: int) -> None:
    hidden, weight, _, labels = drawn()
    of_head, of_call = {"scale": 2.0, "softcap": 2.0}, {"reduction": "sum", "ignore_index": 1, "z_loss": 0.1}
    for name, value in (of_head | of_call | {"label_smoothing": 0.1, "entropy": True}).items():
        odd: dict[str, Any] = {name: value} if rank == 1 else {}
        head = Head(weight=weight.chunk(ranks)[rank], group=dist.group.WORLD, **(odd if name in of_head else {}))
        loss: Any = token_scores if name == "entropy" else cross_entropy
        with pytest.raises(DisagreementError, match=f"'{name}': {value if odd and name != 'reduction' else ''}"):
            loss(hidden, head, labels, **({} if name in of_head else odd))
        with patch("dfa_megatron.loss.tiled._differs", lambda all_of, mine, *_: (all_of != mine).any()):  # as on a GPU
            found = loss(hidden, head, labels, **({} if name in of_head else odd))
        assert getattr(found, "logprobs", found).isnan().any()
    head = Head(weight=weight.chunk(ranks)[rank], group=dist.group.WORLD)
    with pytest.raises(DisagreementError, match=r"'z_loss': 0\.125"):  # in a tensor, which would be shortened in words
        cross_entropy(hidden, head, labels, z_loss=torch.tensor(0.125 + (rank == 1) * 2e-7))
    part, every = head.weight, labels.repeat(ranks)
    base = {"hidden": hidden, "weight": part, "labels": every, "tile": 8, "partition": None, "sequence_parallel": True}
    some: list[dict[str, Any]] = [  # other sizes or numbers of messages, from which gloo would abort
        {"tile": 3},
        {"hidden": hidden[2:], "labels": every[2 * ranks :]},
        {"hidden": hidden.float(), "weight": part.float()},
        {"hidden": hidden[:, 1:], "weight": part[:, 1:]},
        {"weight": part.detach()},
        {"partition": (len(part),) * ranks},
        {"hidden": hidden.repeat(ranks, 1), "sequence_parallel": False},
        {"labels": every[1:]},
    ]
    for odd in some:
        given: dict[str, Any] = base | (odd if rank == 1 else {})
        mine, own, tile = (given.pop(name) for name in ("hidden", "labels", "tile"))
        with pytest.raises((DisagreementError, UnsupportedError), match=r"or refuse it|each token needs one"):
            token_scores(mine, Head(group=dist.group.WORLD, **given), own, tile=tile)
    with pytest.raises(UnsupportedError if rank == 1 else DisagreementError, match="it starts at 1"):
        by_document(labels, (int(rank == 1), TOKENS * ranks))
    for step in range(80):  # a schedule, which would be waited for at each step
        cross_entropy(hidden, head, labels, z_loss=step * 1e-3)
    assert len(tiled._AGREED) == 64
    assert tiled._differs(MagicMock(is_cuda=True, __ne__=lambda *_: torch.ones(2)), 0, "a later step")


def gathers(layout: str | Layout, offsets: tuple[int, ...]) -> None:
    """Give every rank some tokens, and compare what comes back with the caller's documents."""
    row = torch.randn(2, 13, generator=torch.Generator().manual_seed(3))
    got = by_document(shard_sequence(row, layout=layout), offsets, layout=layout)
    wanted = [row[:, lo:hi] for lo, hi in itertools.pairwise(offsets)]
    assert len(got) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@over_ranks(1, 2, 3, timeout=120)
def test_numbers_of_documents_that_were_cut_one_by_one_come_back_in_order(rank: int, world_size: int) -> None:
    """Packs as Megatron cuts them, and rows; a layout that does not say which of them it is is refused."""
    if world_size == 1:
        row = torch.randn(2, 12)
        assert torch.equal(torch.cat(by_document(row, (0, 5, 12), layout="zigzag_documents"), 1), row)
        assert torch.equal(torch.cat(by_document(row, (0, 4, 12), layout="zigzag"), 1), row)
        return
    step = 2 * world_size
    for seed, rooms in enumerate(((3, 1, 2), (1,), (1, 1, 1, 1, 5), (1 / step, 1.5, 2))):
        lengths = [round(room * step) for room in rooms]
        offsets = (0, *itertools.accumulate(lengths))
        row = torch.randn(2, offsets[-1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        documents = [row[:, lo:hi] for lo, hi in itertools.pairwise(offsets)]
        mine = torch.cat([shard_sequence(document, layout="zigzag") for document in documents], 1).requires_grad_()
        found = by_document(mine, torch.tensor(offsets, dtype=torch.int32), layout="zigzag_documents")
        assert [*map(torch.Tensor.tolist, found)] == [*map(torch.Tensor.tolist, documents)]
        weights = torch.randn(row.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        (torch.cat(found, 1) * weights).sum().backward()
        parts = [shard_sequence(x, layout="zigzag") for x in weights.split(lengths, 1)]
        torch.testing.assert_close(mine.grad, world_size * torch.cat(parts, 1))
        whole = shard_sequence(row, layout="zigzag")
        assert torch.equal(by_document(whole, layout="zigzag")[0], row)
        if len(rooms) > 1 and seed < 3:
            for values in (mine, whole):
                with pytest.raises(UnsupportedError, match=r"in layout 'zigzag'.*layout='zigzag_documents'"):
                    by_document(values, offsets, layout="zigzag")
    with pytest.raises((UnsupportedError, DisagreementError)):
        by_document(mine, (0, step), layout="zigzag_documents")
