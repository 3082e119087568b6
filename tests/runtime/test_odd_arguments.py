"""What is no tensor, no group, no mask, or no plain call is refused in words."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dfa_megatron
from dfa_megatron import DistAttentionConfig, TrainingConfig, indexed, layouts, loss, masks, names, recurrence
from dfa_megatron.errors import DisagreementError, UnsupportedError
from dfa_megatron.runtime import prepare
from tests.support.workers import over_ranks


def tensors(rows: int = 8, heads: int = 2, dim: int = 8, dim_v: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(1, rows, heads, d, generator=generator, requires_grad=True) for d in (dim, dim, dim_v)]


def attend(*qkv: Any, **options: Any) -> torch.Tensor:
    out = dfa_megatron.dist_flash_attn_func(*qkv, **{"causal": True} | options)
    assert isinstance(out, torch.Tensor)
    return out


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a number as group": (lambda: attend(*tensors(), group=0), "group=0"),
    "ranks as group": (lambda: attend(*tensors(), group=[0, 1]), r"group=\[0, 1\]"),
    "sinks in a list": (lambda: attend(*tensors(), sinks=[0.0, 0.0]), "sinks of type list"),
    "slopes": (lambda: attend(*tensors(), alibi_slopes=torch.ones(2)), "the argument alibi_slopes: .*rotary"),
    "a learned scale": (lambda: _chosen(torch.nn.Parameter(torch.ones(()))), r"softmax_scale=Parameter"),
    "a negative scale": (lambda: _chosen(-1.0), r"softmax_scale=-1.0: it is positive and finite"),
    "no scale": (lambda: _decode(lambda x: x, softmax_scale=0.0), r"softmax_scale=0.0: it is positive and finite"),
    "a truth": (lambda: _decode(lambda x: x, softcap=True), r"softcap=True: it must be of type float"),
    "a scale of an indexer's teacher": (lambda: _indexed(float("nan")), r"softmax_scale=nan"),
    "an array": (lambda: attend(tensors()[0].detach().numpy(), *tensors()[1:]), "q of type ndarray"),
    "a mask beside documents": (
        lambda: _pack((0, 8), mask=masks.causal(8)),
        r"the argument mask: .* What works: dist_flash_attn_func\(mask=...\)",
    ),
    "a plan beside documents": (lambda: _pack((0, 8), plan=None), r"What works: dist_flash_attn_func\(plan=...\)"),
    "no offsets": (
        lambda: dfa_megatron.dist_flash_attn_varlen_func(*(x[0] for x in tensors()), None, causal=True),
        "cu_seqlens",
    ),
    "a mask without a pair": (
        lambda: attend(*tensors(), causal=None, mask=masks.union("none", 8, [])),
        "no token attends to any",
    ),
    "gradients of a batch": (lambda: _many_gradients(), "is_grads_batched"),
    "torch.func": (lambda: torch.func.grad(lambda q: attend(q, *tensors()[1:]).sum())(tensors()[0]), "torch.func"),
}  # fmt: skip


def _chosen(scale: Any) -> Any:
    return indexed.sparse_attn(*tensors(), torch.zeros(1, 8, 1, dtype=torch.int64), softmax_scale=scale)


def _indexed(scale: Any) -> Any:
    q, k, _ = tensors()
    return indexed.index_loss(q, k[:, :, 0], q[..., 0], q, k, torch.zeros(1, 2, 8), softmax_scale=scale)


def _many_gradients() -> None:
    q, k, v = tensors()
    out = attend(q, k, v)
    torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("what", REFUSED)
def test_an_odd_argument_is_refused_in_words(what: str) -> None:
    action, match = REFUSED[what]
    with pytest.raises(UnsupportedError, match=match):
        action()


def _pack(cu_seqlens: Any, **options: Any) -> torch.Tensor:
    return dfa_megatron.dist_flash_attn_varlen_func(*(x[0] for x in tensors()), cu_seqlens, **options)


def _decode(of: Callable[[Any], Any], **options: Any) -> torch.Tensor:
    q, k, v = (x.detach().expand(2, -1, -1, -1) for x in tensors())
    return dfa_megatron.decode_attn_func(q[:, :1], k, v, starts=of([3, 4]), **options)


def _config(of: Callable[[Any], Any]) -> tuple[torch.Tensor, TrainingConfig]:
    config = DistAttentionConfig(ulysses_degree=of(1))
    return attend(*tensors(), config=config), TrainingConfig(loss_tile=of(4), remat_offload=of(True))


NUMBERS: dict[str, Callable[[Callable[[Any], Any]], Any]] = {
    "causal": lambda of: attend(*tensors(), causal=of(True), softmax_scale=of(0.25), window_size=of((3, 0))),
    "window": lambda of: attend(*tensors(), causal=of(False), softmax_scale=of(1), window_size=of([3, 2])),
    "softcap": lambda of: attend(*tensors(), softcap=of(3.0), config=DistAttentionConfig(kernel="reference")),
    "pack": lambda of: _pack(of([0, 5, 8]), causal=of(True), window_size=of((2, -1))),
    "offsets": lambda of: _pack(tuple(map(of, (0, 5, 8))), causal=of(False)),
    "rows": lambda of: dfa_megatron.dist_flash_attn_varlen_func(*tensors(), [of([0, 3, 8])], causal=True),
    "config": _config,
    "logits": lambda of: dfa_megatron.max_logits(
        *tensors()[:2], causal=of(True), softmax_scale=of(0.5), softcap=of(2.0), cu_seqlens=of((0, 5, 8))
    ),
    "decode": lambda of: _decode(of, softmax_scale=of(0.5)),
    "roll": lambda of: dfa_megatron.roll_sequence(
        tensors()[0], of(1), dim=of(1), cu_seqlens=of([0, 5, 8]), fill=of(2.0)
    ),
    "shard": lambda of: dfa_megatron.shard_sequence(tensors()[0], dim=of(1), cu_seqlens=of([0, 8])),
    "positions": lambda of: dfa_megatron.local_positions(of(8), cu_seqlens=of([0, 5, 8])),
    "tree": lambda of: dfa_megatron.tree_positions(of([3, 4]), of([-1, 0])),
    "plan": lambda of: dfa_megatron.make_plan(masks.causal(of(64)), of(4)),
    "full": lambda of: masks.full(of(8)),
    "sliding": lambda of: masks.sliding_window(of(8), of(3), of(1)),
    "documents": lambda of: masks.documents(of([5, 3]), causal=of(True), window_size=of((3, 2)), room=of([6, 4])),
    "prefix": lambda of: masks.prefix_lm(of(8), of(3)),
    "prefixes": lambda of: masks.prefix_lm_documents(of([5, 3]), of(2)),
    "blockwise": lambda of: masks.causal_blockwise(of([5, 3])),
    "blocks": lambda of: masks.block_causal_documents(of([5, 3]), of(2)),
    "two-way": lambda of: masks.two_way_blocks(of([8]), [of((1, 4))], left=of(5)),
    "global": lambda of: masks.global_sliding(of(8), of(2), of(2), causal=of(True)),
    "trees": lambda of: masks.prompt_tree(of([5, 3]), of([-1, 0]), window=of(4)),
    "cross": lambda of: masks.cross_documents(of([5, 3]), of([4, 4]), causal=of(True), window_size=of((3, 1))),
    "union": lambda of: masks.union("mine", of(8), [masks.Tile(masks.Span(of(0), of(8)), masks.Span(of(0), of(8)))]),
    "two": lambda of: masks.two_sequences("x", of(8), of(6), [masks.Tile(masks.Span(0, of(8)), masks.Span(0, of(6)))]),
    "dense": lambda of: masks.from_dense(lambda b, h, i, j: j <= i, of(8), most=of(9)),
    "layouts": lambda of: (layouts.contiguous(of(8), of(3)), layouts.of_lengths(of([8, 3]))),
    "zigzag": lambda of: layouts.zigzag(of(120), of(70)),
    "zigzags": lambda of: layouts.zigzag_documents(of([0, 5, 8]), of(2)),
}  # fmt: skip


MASKS = [*NUMBERS][[*NUMBERS].index("full") : [*NUMBERS].index("layouts")]


@pytest.mark.parametrize(("what", "tensors"), [*((name, False) for name in NUMBERS), *((name, True) for name in MASKS)])
def test_numbers_of_numpy_and_of_tensors_in_masks_mean_what_pythons_do(what: str, tensors: bool) -> None:
    """Draw their types: in lists each number by itself, or an array."""
    draw = random.Random(what)
    array, flag = (torch.tensor, torch.tensor) if tensors else (np.array, np.bool_)

    def of(value: Any) -> Any:
        if isinstance(value, list | tuple):
            mixed = type(value)(of(one) if draw.random() < 0.7 else one for one in value)
            return array(value) if draw.random() < 0.3 else mixed
        if isinstance(value, bool):
            return flag(value)
        if tensors:
            return torch.tensor(value, dtype=draw.choice([torch.int8, torch.int32, torch.int64]))
        kinds = [np.float32, np.float64] if isinstance(value, float) else [np.int8, np.int32, np.int64, np.uint8]
        return draw.choice(kinds[: 3 if value == -1 else 4])(value if -129 < value < 128 else np.int64(value))

    want, text = NUMBERS[what](lambda value: value), repr(NUMBERS[what](lambda value: value))
    for _ in range(8):
        found = NUMBERS[what](of)
        assert torch.equal(found, want) if isinstance(want, torch.Tensor) else repr(found) == text


@pytest.mark.parametrize(
    ("right", "odd", "why"),
    [
        ({"window_size": (8, 0)}, {"window_size": (8.0, 0)}, r"window_size=\(8.0, 0\): it is the tokens"),
        ({"window_size": (1, 0)}, {"window_size": (True, False)}, r"window_size=\(True, False\): it is the tokens"),
        ({"causal": True}, {"causal": 1}, "causal=1: it must be of type bool"),
        ({"causal": False}, {"causal": 0.0}, "causal=0.0: it must be of type bool"),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}, "softmax_scale=True: it must be of type float"),
        ({"softmax_scale": 0.5}, {"softmax_scale": torch.tensor(0.5)}, "0.5000.: it must be of type float"),
        ({"softcap": 0.0}, {"softcap": False}, "softcap=False: it must be of type float"),
    ],
)  # fmt: skip
def test_what_equals_a_right_value_is_refused_whatever_came_before(
    right: dict[str, Any], odd: dict[str, Any], why: str
) -> None:
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=why):
            attend(*tensors(), **odd)
        assert attend(*tensors(), **right).shape == (1, 8, 2, 8)


@over_ranks(2, 3)
def test_the_whole_sequence_on_each_rank_is_told_once(rank: int, ranks: int) -> None:
    """Draw parts that are the same on every rank, and some that are not or say nothing."""
    draw, heard = random.Random(ranks), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    prepare.logger.addHandler(handler)
    for number in range(1, 30):
        names.say_once.cache_clear()
        dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
        kind = draw.choice(["whole", "parts", "one", "alike", "empty"])
        held = [0] * ranks if kind == "empty" else [number + 1] * ranks
        held[0] += kind == "empty"
        torch.manual_seed(number if kind == "whole" else number * ranks + rank)
        q, k, v = (torch.randn(1, held[rank], 2, 4 * number, dtype=dtype) for _ in range(3))
        if kind == "one":  # queries alone are the same
            q = torch.ones_like(q).cumsum(1)
        if kind == "alike":
            q, k, v = (torch.full_like(x, draw.choice([0.0, 1.0, 0.1])) for x in (q, k, v))
        if packed := draw.random() < 0.5 and kind != "empty":
            total = ranks * held[rank]
            dfa_megatron.dist_flash_attn_varlen_func(q[0], k[0], v[0], (0, 1, total), causal=True)
        else:
            attend(q, k, v, layout=layouts.of_lengths(held))
        assert len(heard) == (kind == "whole"), (kind, packed, heard)
        attend(
            *(x[:, : held[rank] // 2 + 1] for x in (q, k, v)),
            layout=layouts.of_lengths([n // 2 + (n > 0) for n in held]),
        )
        assert len(heard) == (kind == "whole"), "once"
        heard.clear()


@over_ranks(1, 2)
def test_more_heads_than_tokens_are_refused_on_every_rank_until_they_are_allowed(rank: int, ranks: int) -> None:
    draw = random.Random(ranks)
    for allowed in (False, True):
        for _ in range(6):
            heads = draw.choice([255, 256, 257, 512])
            rows = [draw.choice([heads - 1, heads, 4]) for _ in range(ranks)]
            q = torch.zeros(1, rows[rank], heads, 8)
            k = q[:, :, : draw.choice([n for n in range(1, heads + 1) if heads % n == 0])]
            layout = layouts.of_lengths(rows)
            if allowed or heads < 256 or min(rows) >= heads:
                assert attend(q, k, k, layout=layout).shape == q.shape
                continue
            with pytest.raises((UnsupportedError, DisagreementError), match=r"transpose.*allow_more_heads_than_tokens"):
                attend(q, k, k, layout=layout)
        dfa_megatron.allow_more_heads_than_tokens()


# Tensors that nearly fit: one of a call has another shape or dtype, and the call runs or is refused in words.

DTYPES = (torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
OFFSETS: tuple[Any, ...] = ((0, 8), (0, 3, 8), [(0, 8), (0, 2, 8)], [(0, 8)], (0, 9), (), (8,), (0, 8, 4), [()])


class Draws(random.Random):
    """Draws the tensors of a call, of which one has an odd shape and perhaps another an odd dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.odd = random.Random(seed)
        self.shape_in, self.dtype_in = self.odd.randrange(7), self.odd.randrange(12)

    def x(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        sizes, self.shape_in, self.dtype_in = [*shape], self.shape_in - 1, self.dtype_in - 1
        if self.shape_in == 0:
            at = self.odd.randrange(len(sizes))
            sizes = self.odd.choice([
                [*sizes[:at], self.odd.choice([0, 1, sizes[at] + 1, sizes[at] - 1, 2 * sizes[at]]), *sizes[at + 1 :]],
                [*sizes[:at], *sizes[at + 1 :]], [*sizes[:at], self.odd.randrange(3), *sizes[at:]], [],
            ])  # fmt: skip
        return torch.randn(sizes).mul(3).to(self.odd.choice(DTYPES) if self.dtype_in == 0 else dtype)

    def qkv(self) -> tuple[torch.Tensor, ...]:
        return self.x(2, 8, 4, 16), self.x(2, 8, 2, 16), self.x(2, 8, 2, 16)

    def index(self) -> tuple[torch.Tensor, ...]:
        return self.x(2, 8, 3, 8), self.x(2, 8, 8), self.x(2, 8, 3)

    def words(self) -> tuple[Any, ...]:
        hidden, head = self.x(2, 8, 16), loss.Head(weight=self.x(32, 16), bias=self.choice([None, self.x(32)]))
        return hidden, head, self.x(2, 8, dtype=torch.int64)

    def dim(self) -> int:
        return self.choice([1, 0, -1, 5])

    def offsets(self, *usual: Any) -> Any:
        return self.choice([*usual * 20, *OFFSETS])


CALLS: dict[str, Callable[[Draws], object]] = {
    "attention": lambda d: dfa_megatron.dist_flash_attn_func(*d.qkv(), causal=True, sinks=d.choice([None, d.x(4)])),
    "mask": lambda d: attend(*d.qkv(), causal=None, mask=d.choice([masks.causal(8), [masks.causal(8)] * 2])),
    "pack": lambda d: dfa_megatron.dist_flash_attn_varlen_func(*d.qkv(), d.offsets([(0, 8), (0, 3, 8)]), causal=True),
    "tokens": lambda d: dfa_megatron.dist_flash_attn_varlen_func(
        *(d.x(8, n, 16) for n in (4, 2, 2)), d.offsets((0, 8)), causal=True
    ),
    "shard": lambda d: dfa_megatron.shard_sequence(d.x(2, 8, 3), dim=d.dim(), cu_seqlens=d.offsets(None)),
    "unshard": lambda d: dfa_megatron.unshard_sequence(d.x(2, 8, 3), dim=d.dim(), cu_seqlens=d.offsets(None)),
    "roll": lambda d: dfa_megatron.roll_sequence(d.x(2, 8, 3), -1, dim=d.dim(), cu_seqlens=d.offsets(None)),
    "decode": lambda d: dfa_megatron.decode_attn_func(
        d.x(2, 1, 4, 16), *d.qkv()[1:], starts=d.choice([None, [0, 3], [1, 9], [0]])
    ),
    "max logits": lambda d: dfa_megatron.max_logits(*d.qkv()[:2], causal=True),
    "topk": lambda d: indexed.index_topk(*d.index(), d.choice([3, 20, 0]), cu_seqlens=d.offsets(None)),
    "chosen": lambda d: indexed.sparse_attn(*d.qkv(), d.x(2, 8, 3, dtype=torch.int64).clamp(-1, 7)),
    "latent": lambda d: indexed.sparse_attn(
        d.x(2, 8, 4, 24), d.x(2, 8, 1, 24), None, torch.zeros(2, 8, 1).long(), head_dim_v=d.choice([16, 25, None])
    ),
    "indexer": lambda d: indexed.index_loss(*d.index(), *d.qkv()[:2], d.x(2, 4, 8)),
    "scores": lambda d: loss.token_scores(*d.words(), tile=d.choice([4, 100])),
    "cross-entropy": lambda d: loss.cross_entropy(*d.words()),
    "convolution": lambda d: recurrence.dist_conv(
        lambda x, _: x * 1, d.x(2, 8, 6), d.choice([4, 0, 2.5]), dim=d.dim(), cu_seqlens=d.offsets(None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_whose_tensors_nearly_fit_runs_or_is_refused_in_words(name: str) -> None:
    torch.manual_seed(0)
    ran = 0
    for seed in range(150):
        try:
            CALLS[name](Draws(seed))
            ran += 1
        except UnsupportedError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert 0 < ran < 150
