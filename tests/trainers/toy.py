"""A tiny GPTModel in Megatron's DDP, and documents to pack: what the scripts that run trainers' own code share."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from dfa_megatron import MegatronConfig
from dfa_megatron.megatron import distribute_attention
from dfa_megatron.megatron.cpu.stand_in import use_cpu
from tests.support.megatron_model import Parallel, config_of, set_weights, start
from tests.support.workers import run_ranks

LENGTHS, VOCABULARY = (13, 5, 23, 9), 64
FIELDS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "transformer_impl": "local",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def documents() -> list[torch.Tensor]:
    """Tokens of documents, each of odd length."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def layers(config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of docs/trainers.md; on one rank Megatron's own, which takes packs document by document."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config, config.transformer_impl == "transformer_engine", vp_stage=vp_stage)
    if config.context_parallel_size > 1:
        options = MegatronConfig(data_layout="boundary", checkpoint="remat")
        return distribute_attention(spec, config, config=options)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = by_document()
    return spec


def by_document() -> type[Any]:
    """Return Megatron's DotProductAttention, called for each document of a pack: the stand-in for its CUDA kernels."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    class ByDocument(DotProductAttention):  # type: ignore[misc, unused-ignore]
        def forward(self, query: Any, key: Any, value: Any, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
            ends = packed_seq_params.cu_seqlens_q_padded
            ends = packed_seq_params.cu_seqlens_q if ends is None else ends
            parts = (x.split(ends.diff().tolist()) for x in (query, key, value))
            whole = partial(super().forward, attention_mask=None, attn_mask_type=AttnMaskType.causal)
            return torch.cat([whole(*(x[:, None] for x in part)) for part in zip(*parts, strict=True)])[:, 0]

    return ByDocument


def weigh(chunks: list[Any]) -> list[Any]:
    """Give a model weights that depend on their names."""
    for chunk in chunks:
        set_weights(chunk)
    return chunks


def wrap(model: Any) -> Any:
    """Give a model its weights, and Megatron's DDP around it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    weigh([model])
    model.config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)


def build(ranks: int, **changes: Any) -> Any:
    """Return a wrapped GPTModel over these context-parallel ranks."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(FIELDS, Parallel(1, 1, ranks, None, None), **changes)
    rope = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return wrap(GPTModel(config, layers(config), VOCABULARY, max_sequence_length=64, **rope))


def begin(ranks: int) -> None:
    """Replace Megatron's CUDA calls and make its groups."""
    use_cpu()
    start(Parallel(1, 1, ranks, None, None))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return what the optimizer would be given."""
    return {f"gradient of {name}": parameter.main_grad for name, parameter in model.module.named_parameters()}


class _Stub(ModuleType):
    """Any module of a package that is not there: capitals name empty classes, other names modules."""

    __path__: ClassVar[list[str]] = []
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else _Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find these packages nowhere else."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        found = any(f"{name}.".startswith(f"{package}.") for package in self.packages)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def stub(*packages: str) -> None:
    """Let packages that need CUDA be imported, once Megatron-Core has found out that they are missing."""
    import megatron.core.optimizer  # noqa: F401
    from megatron.core.transformer import attention

    attention.HAVE_TE = False
    sys.meta_path.insert(0, _Stubs(packages))


def zigzag(ends: torch.Tensor, total: int, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's rows of a pack: what Transformer Engine's thd_get_partitioned_indices returns."""
    documents = torch.arange(total).split(ends[ends >= 0].diff().tolist())
    chunks = [document.chunk(2 * ranks) for document in documents]
    return torch.cat([part for chunk in chunks for part in (chunk[rank], chunk[2 * ranks - 1 - rank])])


def compare(function: Any) -> int:
    """Call function(rank, ranks) on one rank and on two, and print how far each of its tensors differs."""
    sys.path += sys.argv[1:]
    if missing := [folder for folder in sys.argv[1:] if not Path(folder).is_dir()]:
        raise SystemExit(f"no folder {missing[0]}")
    (wanted,) = run_ranks(1, function, timeout=300)
    for rank, found in enumerate(run_ranks(2, function, timeout=300)):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert value.norm() > 0, name
            difference = float((found[name] - value).norm() / value.norm())
            assert difference == pytest.approx(0, abs=1e-5), f"{name}: {difference}"
            print(f"rank {rank} {name:75} {difference:.1e}", file=sys.stdout)
    return 0
