"""Watch layers that compute attention in code of their own, and have their scores stand for distributed attention."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dfa_megatron.huggingface.attention_function import attention
from dfa_megatron.huggingface.layer_context import run_of
from dfa_megatron.huggingface.own_code.noted_scores import Scores
from dfa_megatron.huggingface.refusals import ATTENTION
from dfa_megatron.huggingface.windows import WindowMask

WATCHED = {
    "BloomAttention": True,
    "CodeGenAttention": False,
    "FalconAttention": False,
    "GPTJAttention": False,
    "GPTNeoSelfAttention": False,
    "GPTNeoXJapaneseAttention": False,
    "MegatronBertSelfAttention": False,
    "MptAttention": True,
    "MvpAttention": False,
    "RemBertSelfAttention": False,
    "RoFormerSelfAttention": False,
    "TrOCRAttention": False,
    "XGLMAttention": False,
}
"""Classes of layers, and whether they know places by a bias alone (ALiBi)."""

_WATCHING: ContextVar[tuple[_Watch | None, ...]] = ContextVar("layers that are watched", default=())


def watched(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of a model that are to be watched."""
    return [module for module in model.modules() if type(module).__name__ in WATCHED]


def hook(model: torch.nn.Module) -> None:
    """Hook these layers, which need a `LayerContext` when they run."""
    for module in watched(model):
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.register_forward_hook(_leave, always_call=True)


def _enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    watch = None
    if run_of(module)[1]:  # 0 while attention is local
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        watch = _Watch(module, hidden.shape[0], hidden.shape[1])
        watch.__enter__()  # type: ignore[no-untyped-call]
    _WATCHING.set((*_WATCHING.get(), watch))


def _leave(module: Any, args: tuple[Any, ...], output: Any) -> None:
    *others, watch = _WATCHING.get()
    _WATCHING.set(tuple(others))
    if watch is not None:
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Watch(TorchFunctionMode):
    """Give `Scores` for the product of queries and keys of one run of a layer."""

    def __init__(self, module: torch.nn.Module, batch: int, tokens: int) -> None:
        super().__init__()
        self.module, self.batch, self.tokens, self.running = module, batch, tokens, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.running and func in _PRODUCTS and self._is_of_keys(*args[:2]):
            return self._scores(args[0], args[1])
        if not self.running and func in _WITH_BIAS:
            given = dict(zip(("bias", "batch1", "batch2"), args, strict=False)) | kwargs
            if self._is_of_keys(given["batch1"], given["batch2"]):
                scores = self._scores(given["batch1"], given["batch2"])
                return self._biased(scores, given["bias"], given.get("beta", 1.0), given.get("alpha", 1.0))
        return func(*args, **kwargs)

    def _is_of_keys(self, queries: Any, keys: Any) -> bool:
        if not (isinstance(queries, torch.Tensor) and isinstance(keys, torch.Tensor)) or queries.dim() < 3:
            return False
        return queries.shape[-2] == keys.shape[-1] == self.tokens and queries.shape[-1] == keys.shape[-2]

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor) -> Scores:
        q, k = (x if x.dim() == 4 else x.unflatten(0, (self.batch, -1)) for x in (queries, keys.transpose(-1, -2)))
        shape, name = torch.Size((*queries.shape[:-1], self.tokens)), type(self.module).__name__
        return Scores(name, q, k, shape, self._run, places_by_bias=WATCHED[name])

    def _biased(self, scores: Scores, bias: torch.Tensor, beta: float, alpha: float) -> Scores:
        """Return scaled scores with a bias (batch * heads, 1, tokens), or with none of zeros."""
        scores = replace(scores, scale=alpha)
        return scores if bias.shape == scores.shape and not bias.any() else scores.biased(bias, beta)

    def _run(self, scores: Scores, value: torch.Tensor) -> torch.Tensor:
        self.running = True
        try:
            q, k = (x.to(value.dtype) for x in (scores.query, scores.key))
            more: dict[str, Any] = {} if scores.slopes is None else {"alibi_slopes": scores.slopes}
            out, _ = attention(self.module, q, k, value, self._mask(scores), scaling=scores.scale, **more)
            return out.transpose(1, 2)
        finally:
            self.running = False

    def _mask(self, scores: Scores) -> Any:
        """Return the mask of the whole sequence, where the layer's own mask of this rank's tokens agrees with it."""
        module: Any = self.module
        size: int | None = module.config.window_size if getattr(module, "attention_type", "") == "local" else None
        seen = self.tokens if size is None else min(size, self.tokens)
        ATTENTION.check(own_code="where" if scores.seen not in (None, seen) else None, layer=scores.layer)
        return scores.mask if scores.seen is None or size is None else WindowMask(size)


_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)
_WITH_BIAS = (torch.baddbmm, torch.Tensor.baddbmm)
