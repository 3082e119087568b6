"""Planning ahead: in data-loader workers, so that new documents, masks or trees cost the loop next to nothing.

    planner = AttentionPlanner(8192, heads=64, kv_heads=8, head_dim=128, causal=True, group=group)  # on every rank

    def collate(documents): ...                                                      # in a data-loader worker
        batch["attention"] = planner(cu_seqlens)                                     # or planner(mask)

    batch.pop("attention").use()                                                     # in the loop, before the forward

Whatever calls `dist_flash_attn_varlen_func` with these documents, or `dist_flash_attn_func` with this mask, then finds
its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dfa_megatron.config import DistAttentionConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.plan.language.geometry import Form
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.plan.language.shape import split_heads
from dfa_megatron.plan.language.tree import Tree
from dfa_megatron.runtime.comm.channel import Channel
from dfa_megatron.runtime.comm.groups import Group, channel_of
from dfa_megatron.runtime.cu_seqlens import check_offsets, offsets_of
from dfa_megatron.runtime.execute.ulysses import stand_ins
from dfa_megatron.runtime.problem import Inputs, MaskKind, Problem, degree_of, kind_of, of_neighbours, problem_of
from dfa_megatron.runtime.rank_plan import RankPlan, work_out
from dfa_megatron.runtime.request import DEFAULTS, Request


class AttentionPlanner:
    """Plans packs, masks and trees for this rank without its GPU, its process group, or any message; it pickles.

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
        batch: sequences of a call with a mask; a pack is one.
        causal, window_size: of packs, as for `dist_flash_attn_varlen_func`; a mask says it itself.
        group, softcap, layout, config: as for the functions.

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
        batch: int = 1,
        causal: bool | None = None,
        group: Group = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        layout: str = "contiguous",
        config: DistAttentionConfig = DEFAULTS,
    ) -> None:
        over = channel_of(group)
        self._rank, self._ranks = (over.rank, over.size) if over else (0, 1)
        self._tokens, self._packs = self._ranks * local_tokens, causal is not None
        self._asks = Request(
            softmax_scale=1.0,
            causal=bool(causal),
            window_size=window_size,
            softcap=softcap,
            layout=layout,
            cu_seqlens=(0, self._tokens),
            config=config,
        )
        self._asks.check()
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        counts = heads, kv_heads or heads
        q, k = (torch.empty((), dtype=dtype, device=place).expand(1, local_tokens, n, head_dim) for n in counts)
        inputs = Inputs(q, k, k[..., :1].expand(*k.shape[:3], head_dim_v or head_dim))
        self._cuda, self._problems = q.is_cuda, self._all(inputs, batch, over)
        alone = self._problems[config.fixed_degree, None]
        if self._packs and isinstance(alone, UnsupportedError):
            raise alone

    def _all(
        self, inputs: Inputs, batch: int, over: Channel | None
    ) -> dict[tuple[int, MaskKind | None], _ProblemOrError]:
        """Return the problems of all degrees and kinds of masks, and of packs: workers cannot ask a GPU for kernels."""
        config, ranks, heads = self._asks.config, self._ranks, inputs.q.shape[2]
        others = range(2, ranks + 1) if config.ulysses_degree == "auto" else ()
        degrees = [config.fixed_degree, *(degree for degree in others if not (ranks % degree or heads % degree))]
        kinds = (None, *KINDS)
        return {(degree, kind): self._made(inputs, batch, over, degree, kind) for degree in degrees for kind in kinds}

    def _made(
        self, inputs: Inputs, batch: int, over: Channel | None, degree: int, kind: MaskKind | None
    ) -> _ProblemOrError:
        """Return the problem of a kind of mask, or of packs, with this rank among those of its plan."""
        asks, rank, ranks = self._asks, self._rank, self._ranks
        if kind is not None:
            inputs = Inputs(*(x.expand(batch, *x.shape[1:]) for x in inputs[:3]))
        try:
            if degree > 1:
                heads = split_heads(degree, ranks, inputs.q.shape[2], inputs.k.shape[2])
                tokens, asks = of_neighbours(asks, degree, rank, ranks, inputs.q.shape[1])
                group = tokens.plan_group
                rank, ranks = group.index(rank), len(group)
                inputs = Inputs(*stand_ins(heads, sum(tokens.rows), *inputs[:3]))
            return problem_of(asks, ranks, inputs, over, exchanged=degree > 1, kind=kind), rank
        except UnsupportedError as error:
            return error

    def __call__(self, what: torch.Tensor | Sequence[int] | Mask | Tree) -> RankPlan:
        """Return the plan of documents, given as `cu_seqlens`, or of a mask or tree of the whole sequence.

        Raises:
            UnsupportedError: they have another length, or nothing serves them.
        """
        if isinstance(what, Tree):
            what = what.mask(self._asks.window_size[0])
        if isinstance(what, Mask):
            asks = replace(self._asks, causal=None, window_size=(-1, -1), mask=what, cu_seqlens=())
            kind: MaskKind | None = kind_of(asks, self._tokens)
        else:
            if not self._packs:
                raise UnsupportedError(
                    "a pack", "the planner does not know whether it is causal", "causal=True or False"
                )
            asks, kind = replace(self._asks, cu_seqlens=offsets_of(what)), None
            check_offsets(asks.cu_seqlens, self._tokens)
        whole, rank = self._problem(asks.config.fixed_degree, kind, asks)
        degree = degree_of(asks, whole, self._ranks, cuda=self._cuda)
        try:
            problem, rank = self._problem(degree, kind, asks)
            plan = work_out(problem, rank)
        except UnsupportedError:
            if degree == asks.config.fixed_degree:
                raise
            degree, plan = 1, work_out(whole, rank)
        return replace(plan, asked=whole, degree=degree)

    def _problem(self, degree: int, kind: MaskKind | None, asks: Request) -> tuple[Problem, int]:
        made = self._problems[degree, kind]
        if isinstance(made, UnsupportedError):
            raise made
        return replace(made[0], asks=asks.for_plan()), made[1]


_ProblemOrError = tuple[Problem, int] | UnsupportedError
"""A problem and this rank's number in its plan, or why there is none."""

_FORMS: tuple[tuple[Form, ...], ...] = ("full",), ("full", "causal"), ("full", "band"), ("full", "causal", "band")
KINDS = [MaskKind(frozenset(forms), packed) for forms in _FORMS for packed in (False, True)]
"""All kinds of masks."""
