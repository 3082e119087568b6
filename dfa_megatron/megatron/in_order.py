"""Mamba mixers and delta nets on tokens in order: this rank's tokens, from the state that earlier ranks leave.

Megatron's mixers exchange heads for tokens around their kernels, and assume its zigzag order. Here a mixer is built as
on one rank and sees this rank's tokens only. Its short convolution and its recurrence are distributed instead; weights,
state dictionaries and the layer around it are Megatron's.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F

from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import for_a_while
from dfa_megatron.megatron.layers.swapped import ONE_RANK
from dfa_megatron.megatron.replace import reach, replace, with_ours
from dfa_megatron.megatron.tokens.visit import current_visit
from dfa_megatron.plan.language.mask import Mask
from dfa_megatron.recurrence import Convolve, dist_conv, dist_mamba2, dist_scan, fla_scan
from dfa_megatron.runtime.agreement.calls import at_layer
from dfa_megatron.runtime.cu_seqlens import Offsets

logger = logging.getLogger("dfa_megatron.megatron")

OTHER_ORDER = (
    "it is no MambaMixer, GatedDeltaNet or KimiDeltaAttention of Megatron's, and may assume zigzag order of the tokens",
    "a mixer of these classes, or data_layout='zigzag'",
)
"""Why a mixer is refused where tokens are in order, and what works."""
_OURS = ("initial_state", "output_final_state", "cu_seqlens")
"""The arguments of a kernel that say where states come from and go."""
_TOKENS = ("q", "k", "v", "g", "beta")
"""The first arguments of FLA's delta rule, which Megatron passes by place or by name."""
_DELTAS = ("GatedDeltaNet", "KimiDeltaAttention")
"""Megatron's mixers with a delta rule. The second is in its development branch, and in no release yet."""
_LONG_NAMES = {"query": "q", "key": "k", "value": "v"}
"""Those of Megatron's own function."""


class _RunningMixer(threading.local):
    mixer: InOrder | None = None


_MIXER = _RunningMixer()
"""The delta net whose forward this thread runs."""


class InOrder:
    """Run a mixer on this rank's tokens; the first base of every class that `in_order_class` makes."""

    dfa_reaches = ("convolution", "scan")

    def __init__(self, config: Any, *args: Any, pg_collection: Any, options: MegatronConfig, **kwargs: Any) -> None:
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)  # type: ignore[call-arg]
        self.cp_group = pg_collection.cp
        """The ranks that share the sequence, under the name by which trainers swap them."""
        self._dfa_config = options

    @property
    def pg_collection(self) -> Any:
        """Return the groups that the mixer itself knows, with one context-parallel rank; a trainer may swap them."""
        return vars(self)["_dfa_alone"]

    @pg_collection.setter
    def pg_collection(self, groups: Any) -> None:
        vars(self)["_dfa_alone"] = alone = copy.copy(groups)
        alone.cp = ONE_RANK

    cp_size = property(lambda _: 1, lambda *_: None)
    """Megatron's gated delta net cuts its projections by this number, and trainers set it where they swap groups."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the mixer's own forward, with the same result."""
        mixer: Any = self
        with for_a_while(_MIXER, mixer=self), at_layer(mixer.layer_number):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]

    def dfa_convolve(self, run: Convolve, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the convolution of (batch, tokens, channels) with a weight of (channels, width)."""
        reach("convolution")
        out: torch.Tensor = dist_conv(run, x, weight.shape[1], packs=True, **self.dfa_where())
        return out

    def dfa_where(self) -> dict[str, Any]:
        """Return the ranks that share the sequence, its documents or the segments of its tree, and the options."""
        visit = current_visit()
        if visit is None:
            return {"group": self.cp_group, "config": self._dfa_config}
        if isinstance(visit.pairs, Mask):
            raise UnsupportedError(
                "a mask in a Mamba or gated delta net layer",
                "a state is that of all tokens of the document, or of the path in a tree, before it",
                "documents, by cu_seqlens, or a prompt_tree",
            )
        parents = None if visit.pairs is None else visit.pairs.parents
        documents = visit.offsets or None
        where = {"group": visit.group, "layout": visit.layout, "config": self._dfa_config}
        return {**where, "cu_seqlens": documents, "parents": parents}


class InOrderMamba(InOrder):
    """Compute a MambaMixer's convolution and scan over the ranks' tokens."""

    use_mem_eff_path = property(lambda _: True, lambda *_: None)
    """Megatron's other way of training, whose name changes with the release, would make the same numbers."""

    def _ssm_training(self, projected: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
        """Return what the mixer's kernel and norm make of the projected z, x, B, C and dt, (tokens, batch, width).

        Megatron's one kernel for both takes no tokens before the convolution, so they are two here.
        """
        mixer: Any = self
        home = importlib.import_module("megatron.core.ssm.mamba_mixer")
        local = mixer.cp
        inner, groups = local.d_inner_local_tpcp, local.ngroups_local_tpcp
        mixed = inner + 2 * groups * mixer.d_state
        z, convolved, dt = projected.transpose(0, 1).split([inner, mixed, local.nheads_local_tpcp], -1)
        weight = local.get_conv1d_weight().squeeze(1)
        run = by_causal_conv1d(home.causal_conv1d_fn, weight, local.get_conv1d_bias())
        convolved = self.dfa_convolve(run, convolved, weight)
        x, b, c = convolved.split([inner, groups * mixer.d_state, groups * mixer.d_state], -1)
        skip = local.get_D().float()
        reach("scan")
        y, _ = dist_mamba2(
            home.mamba_chunk_scan_combined,
            {
                "x": x.unflatten(-1, (-1, mixer.headdim)),
                "dt": dt.float(),
                "B": b.unflatten(-1, (groups, -1)),
                "C": c.unflatten(-1, (groups, -1)),
            },
            -local.get_A_log().float().exp(),
            packs=True,
            chunk_size=mixer.chunk_size,
            D=skip.unflatten(0, (-1, mixer.headdim)) if mixer.D_has_hdim else skip,
            dt_bias=local.get_dt_bias().float(),
            dt_softplus=True,
            **self.dfa_where(),
        )
        y = y.flatten(2).transpose(0, 1)
        z = z.transpose(0, 1)
        return mixer.norm(y, z) if mixer.rmsnorm else y * torch.nn.functional.silu(z)


class InOrderDelta(InOrder):
    """Compute the convolution and the delta rule of a mixer of `_DELTAS` over the ranks' tokens."""

    def __init__(self, config: Any, *args: Any, cp_comm_type: Any = None, **kwargs: Any) -> None:
        if config.deterministic_mode:
            raise UnsupportedError(
                "gated delta net with deterministic_mode",
                "Megatron then computes its convolution with PyTorch's function, where no tokens of another rank enter",
                "no --deterministic-mode",
            )
        super().__init__(config, *args, **kwargs)
        net: Any = self
        if hasattr(net, "gated_delta_rule"):  # Megatron-Core 0.19; before it is a function of the module
            net.gated_delta_rule = _ruling(net.gated_delta_rule)


def is_delta(base: Any) -> bool:
    """Return whether a module of a spec is a mixer of `_DELTAS`, which stands in the place of an attention."""
    return isinstance(base, type) and issubclass(base, _deltas())


def _deltas() -> tuple[type, ...]:
    """Return those of `_DELTAS` that this release has."""
    home = vars(importlib.import_module("megatron.core.ssm.gated_delta_net"))
    return tuple(home[name] for name in _DELTAS if name in home)


def in_order_class(base: type) -> type:
    """Return the subclass of Megatron's MambaMixer, or of a mixer of `_DELTAS`, that runs in order."""
    from megatron.core.ssm.mamba_mixer import MambaMixer

    if issubclass(base, MambaMixer):
        return with_ours(InOrderMamba, base)
    if not is_delta(base):
        raise UnsupportedError(f"the mixer {base.__name__} where tokens are in order", *OTHER_ORDER)
    _replace_calls()
    return with_ours(InOrderDelta, base)


def _replace_calls() -> None:
    """Replace the functions that Megatron's delta nets call, for those that run in order only."""
    for home in [sys.modules[delta.__module__] for delta in _deltas()]:
        replaced = {"causal_conv1d": _convolving_tokens}
        if home.__name__ == "megatron.core.ssm.gated_delta_net":  # one file, before Megatron-Core 0.19
            replaced = {"causal_conv1d_fn": _convolving_channels, "chunk_gated_delta_rule": _ruling}
        for name, replacing in replaced.items():
            replace(home, name, replacing)


def _ruling(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*args: Any, **given: Any) -> Any:
        mixer = _MIXER.mixer
        if mixer is None:
            return kernel(*args, **given)
        reach("scan")
        given = dict(zip(_TOKENS, args, strict=False)) | {_LONG_NAMES.get(name, name): x for name, x in given.items()}
        tokens = {name: given.pop(name) for name in _TOKENS}
        options = _options(given)
        return dist_scan(fla_scan(kernel, **options), tokens, **mixer.dfa_where())[0], None

    return rule


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Return what a call of Megatron's asks of a kernel beside the states, which this package passes."""
    if given.get("initial_state") is not None or given.get("output_final_state"):
        raise UnsupportedError(
            "a state from, or for, another call of a gated delta net on several context-parallel ranks",
            "its states are not kept from call to call",
            "--context-parallel-size 1, or evaluation on whole sequences",
        )
    return {name: option for name, option in given.items() if name not in _OURS}


def _convolving_tokens(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """FLA's convolution, over (batch, tokens, channels)."""

    def convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, **given: Any) -> Any:
        mixer = _MIXER.mixer
        if mixer is None:
            return kernel(x=x, weight=weight, bias=bias, activation=activation, **given)
        fixed = {"weight": weight, "bias": bias, "activation": activation, **_options(given)}

        def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
            offsets = {"cu_seqlens": torch.tensor(documents, device=x.device)} if documents else {}
            out: torch.Tensor = kernel(x=x, **fixed, **offsets)[0]
            return out

        return mixer.dfa_convolve(run, x, weight), None

    return convolution


def _convolving_channels(kernel: Callable[..., Any] | None) -> Callable[..., Any]:
    """causal-conv1d's convolution, over (batch, channels, tokens); None where the package is missing."""

    def convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str, **given: Any) -> Any:
        mixer = _MIXER.mixer
        run = None if kernel is None else functools.partial(kernel, **given)
        if mixer is not None:
            return mixer.dfa_convolve(by_causal_conv1d(run, weight, bias), x.mT, weight).mT
        if run is not None:
            return run(x=x, weight=weight, bias=bias, activation=activation)
        return by_pytorch(weight, bias)(x.mT, ()).mT

    return convolution


def by_causal_conv1d(kernel: Callable[..., Any] | None, weight: torch.Tensor, bias: Any) -> Convolve:
    """Return causal-conv1d's convolution with SiLU, or PyTorch's where that package is missing."""
    if kernel is None:
        _say_missing()
        return by_pytorch(weight, bias)
    convolve = kernel

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        ids = None
        if documents:
            lengths = torch.tensor(_lengths(documents, x))
            ids = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)[None].to(x.device)
        # With ids the channels must lie next to each other, as they do in x.
        out: torch.Tensor = convolve(x=x.mT, weight=weight, bias=bias, seq_idx=ids, activation="silu")
        return out.mT

    return run


def by_pytorch(weight: torch.Tensor, bias: Any) -> Convolve:
    """Return PyTorch's convolution with SiLU."""
    channels, width = weight.shape

    def run(x: torch.Tensor, documents: Offsets) -> torch.Tensor:
        parts = [F.pad(part, (width - 1, 0)) for part in x.mT.split(_lengths(documents, x), 2)]
        out = torch.cat([F.conv1d(part, weight[:, None], bias, groups=channels) for part in parts], 2)
        return F.silu(out).mT

    return run


def _lengths(documents: Offsets, x: torch.Tensor) -> list[int]:
    return [hi - lo for lo, hi in pairwise(documents or (0, x.shape[1]))]


@functools.cache
def _say_missing() -> None:
    logger.warning("dfa: causal-conv1d is not installed, so the short convolutions of mixers run in PyTorch")
