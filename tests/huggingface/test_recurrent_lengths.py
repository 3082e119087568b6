"""What stands in for transformers' recurrences gives its numbers on ranks of any lengths, also of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dfa_megatron.layouts import of_lengths
from tests.huggingface import conftest
from tests.support.close import assert_close
from tests.support.recurrences import by_path
from tests.support.workers import preload, run_ranks

KINDS = "kimi_linear", "mamba", "mamba2", "qwen3_next"
if conftest.INSTALLED:
    preload(*(f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS))

Named = dict[str, torch.Tensor]
COUNTS, LENGTH = (2, 0, 9, 0, 1), 12


def drawn() -> dict[str, tuple[Callable[..., Any], int, Named, Named, dict[str, Any]]]:
    """By name: the real function, the dimension of tokens, its tokens and parameters, and what else it is given."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_scan
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.manual_seed(3)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(2, LENGTH, *shape)

    delta = {"query": rows(2, 4), "key": rows(2, 4), "value": rows(2, 4), "beta": rows(2).sigmoid()}
    x, dt, b, c = rows(4, 3), rows(4), rows(2, 5), rows(2, 5)
    a, bias = -torch.rand(4), torch.randn(4)
    flat = {"hidden_states": rows(4).mT, "dt": dt.mT, "B": rows(3).mT, "C": rows(3).mT}
    return {
        "causal_conv1d_fn": (causal_conv1d_fn, 2, {"hidden_states": rows(4).mT}, {"weight": torch.randn(4, 4)}, {}),
        "torch_chunk_gated_delta_rule": (*(torch_chunk_gated_delta_rule, 1, delta | {"g": -rows(2).abs()}, {}), {
            "chunk_size": 4, "use_qk_l2norm_in_kernel": True,
        }),
        "chunk_kimi_delta_attention": (*(chunk_kimi_delta_attention, 1, delta | {"g": -rows(2, 4).abs() / 4}, {}), {
            "chunk_size": 4, "use_qk_l2norm_in_kernel": True,
        }),
        "mamba2_chunk_scan": (
            *(mamba2_chunk_scan, 1, {"hidden_states": x, "dt": dt, "B": b, "C": c}, {"A": a, "dt_bias": bias}),
            {"chunk_size": 4, "dt_softplus": True},
        ),
        "mamba_selective_scan": (*(mamba_selective_scan, 2, flat, {"A": -torch.rand(4, 3), "delta_bias": bias}), {
            "delta_softplus": True,
        }),
    }  # fmt: skip


def stands_in(rank: int, world_size: int) -> None:
    from dfa_megatron.config import TrainingConfig
    from dfa_megatron.huggingface.current_forward import Forward, LayerContext
    from dfa_megatron.huggingface.hook_mixers import STANDS_IN, options_of
    from dfa_megatron.huggingface.seen import seen_of
    from dfa_megatron.plan.language.tree import Tree
    from dfa_megatron.runtime.comm.groups import group_name

    mine, layout = slice(sum(COUNTS[:rank]), sum(COUNTS[: rank + 1])), of_lengths(COUNTS)
    tree, packs = Tree((3, 4, 2, 3), (-1, 0, 1, 1)), ((0, 5, 5, LENGTH), (0, LENGTH))
    wheres = (
        (None, (), [(0, LENGTH)] * 2),
        (packs, (), packs),
        (seen_of(tree), tree.parents, [(0, *(span.hi for span in tree.spans))] * 2),
    )
    context = LayerContext(group_name(None), world_size, TrainingConfig(), "eager")
    for name, (real, dim, tokens, parameters, fixed) in drawn().items():
        for seen, parents, every in wheres:
            options = options_of(Forward(context, True, seen, layout=layout))
            one, ours = (leaves(tokens | parameters) for _ in range(2))
            rest = {each: one[each] for each in parameters} | fixed

            def alone(path: Named, real: Any = real, rest: Any = rest) -> torch.Tensor:
                return first(real(**path, **rest))

            rows = [{each: one[each][row : row + 1] for each in tokens} for row in range(2)]
            wanted = torch.cat([by_path(alone, row, own, parents, dim) for row, own in zip(rows, every, strict=True)])
            local = {each: x.movedim(dim, 0)[mine].movedim(0, dim) for each, x in ours.items() if each in tokens}
            given = local | {each: ours[each] for each in parameters} | fixed
            out = first(STANDS_IN[name](real, options, given))
            cut = (slice(None),) * dim + (mine,)
            weights = torch.randn(wanted.shape)
            assert_close(out, wanted[cut], tolerance=3e-5, name=name)
            (wanted * weights).sum().backward()
            (out * weights[cut]).sum().backward()
            for each, x in ours.items():
                assert x.grad is not None
                dist.all_reduce(x.grad)
                assert_close(x.grad, one[each].grad, tolerance=3e-4, name=f"{each} of {name}")


def leaves(tensors: Named) -> Named:
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


def test_every_stand_in_is_exact_on_ranks_of_any_lengths() -> None:
    run_ranks(len(COUNTS), stands_in, timeout=120)
