"""Planning packs ahead: in data-loader workers, so that a new pack costs the training loop next to nothing.

    planner = PackPlanner(8192, heads=64, kv_heads=8, head_dim=128, causal=True, group=group)  # once, on every rank

    def collate(documents): ...                                                      # in a data-loader worker
        batch["attention"] = planner(cu_seqlens)

    batch.pop("attention").use()                                                     # in the loop, before the forward

Whatever calls `dist_flash_attn_varlen_func` with these documents then finds its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.plan.language.shape import split_heads, split_tokens, stages_error
from dfa_megatron.runtime.comm.groups import Group, channel_of
from dfa_megatron.runtime.cu_seqlens import check_offsets, offsets_of
from dfa_megatron.runtime.execute.ulysses import stand_ins
from dfa_megatron.runtime.problem import Inputs, problem_of
from dfa_megatron.runtime.rank_plan import RankPlan, work_out
from dfa_megatron.runtime.request import DEFAULTS, Request


class PackPlanner:
    """Plans packs for this rank without its GPU, its process group, or any message; a small value that pickles.

    Making one is collective over the group the first time, as the first attention is. Layers with other windows, heads
    or schedules need planners of their own. Layers that differ only in scale or sinks share one.

    Args:
        local_tokens: tokens of each rank.
        heads: query heads.
        head_dim: of q and k.
        kv_heads: key/value heads; heads if None.
        head_dim_v: of v; head_dim if None.
        dtype: of q, k and v.
        device: on which they are; None is the GPU if there is one.
        causal, group, window_size, softcap, layout, config: as for `dist_flash_attn_varlen_func`.
        alibi: whether calls bring slopes.

    Raises:
        UnsupportedError: no kernel serves the shape.
    """

    def __init__(
        self,
        local_tokens: int,
        *,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        causal: bool,
        group: Group = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi: bool = False,
        layout: str = "contiguous",
        config: DistAttentionConfig = DEFAULTS,
    ) -> None:
        over = channel_of(group)
        self.rank, ranks = (over.rank, over.size) if over else (0, 1)
        request = Request(
            softmax_scale=1.0,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi=alibi,
            layout=layout,
            cu_seqlens=(0, ranks * local_tokens),
            config=config,
        )
        request.check()
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        stages = config.head_stages
        if error := stages_error(stages, kv_heads or heads):
            raise error
        counts = heads // stages, (kv_heads or heads) // stages
        q, k = (torch.empty((), dtype=dtype, device=place).expand(1, local_tokens, count, head_dim) for count in counts)
        inputs = Inputs(q, k, k[..., :1].expand(*k.shape[:3], head_dim_v or head_dim))
        exchanged = config.fixed_degree > 1
        if exchanged:
            split = split_heads(config.fixed_degree, ranks, *counts)
            outer = split_tokens(split.degree, self.rank, ranks, layout, local_tokens).plan_group
            self.rank, ranks, over = outer.index(self.rank), len(outer), None
            inputs = Inputs(*stand_ins(split, *inputs[:3]))
        self.problem = problem_of(request, ranks, inputs, over, exchanged=exchanged)

    def __call__(self, cu_seqlens: torch.Tensor | Sequence[int]) -> RankPlan:
        """Return the plan of these documents: global token offsets, as `dist_flash_attn_varlen_func` takes them.

        Raises:
            UnsupportedError: the offsets do not describe a pack of this length.
        """
        offsets = offsets_of(cu_seqlens)
        check_offsets(offsets, self.problem.ranks * self.problem.local_length)
        problem = replace(self.problem, asks=replace(self.problem.asks, cu_seqlens=offsets))
        return work_out(problem, self.rank)
