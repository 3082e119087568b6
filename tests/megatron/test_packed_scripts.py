"""Packed documents as Megatron's own scripts and datasets make them, and what of them is refused."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import launch
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.megatron.tokens.exchange import positions
from tests.megatron import harness
from tests.megatron.harness import Case, Topology
from tests.megatron.test_launched_training import needs_training
from tests.support.workers import run_ranks


def batch_of(micro: int) -> dict[str, torch.Tensor]:
    """A micro-batch of the harness with documents."""
    offsets = harness.documents(0, micro)
    longest = (offsets[:, 1:] - offsets[:, :-1]).max(1).values
    return {**harness.micro_batch(0, micro), "cu_seqlens": offsets, "max_seqlen": longest}


HERE = SimpleNamespace(batch_of=batch_of, loss_of=harness.share_of_loss, total=None, model=None)
"""The script's data and loss, and its total loss and model."""

# What pretrain_gpt.py of Megatron-LM 0.19 does with packed data between the loader and the model.
SCRIPT = """
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_cp_rank
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_and_validate_args
from tests.megatron import harness, test_packed_scripts

if __name__ == "__main__":
    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    harness.set_weights(model)
    here = test_packed_scripts.HERE
    total = torch.zeros(())
    for micro in range(harness.MICRO_BATCHES):
        batch = {**here.batch_of(micro), "cu_seqlens_padded": None, "local_cp_size": None, "hybrid_cp_group": None,
                 "attention_mask": None}
        batch = flatten_batch_for_packed_sequences(batch)
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=args.hybrid_context_parallel, cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft)
        offsets, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"][0])
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest,
                                 max_seqlen_kv=longest)
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
        loss = here.loss_of(loss, batch)
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    here.total, here.model = total.item(), model
"""


def train_through_a_script(rank: int, world_size: int, script_path: str, flags: list[str], path: str) -> None:
    from tests.megatron.test_flag_path import FLAGS, FULL, OURS

    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), CUDA_DEVICE_MAX_CONNECTIONS="1")
    harness.start(Topology(cp=2))
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    assert launch.main([script_path, *FLAGS.split(), *OURS.split(), *FULL.split(), *flags]) == 0
    assert abs(HERE.total - torch.load(path, weights_only=True)["losses"][0]) <= 1e-5


@pytest.mark.support("megatron", "packed data of Megatron's scripts and datasets")
@needs_training
def test_packed_data_of_a_script_train_like_its_documents_on_one_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "packed.pt")
    run_ranks(1, harness.save_reference, path, Case(options=None, steps=1, packed=True), timeout=120)
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    flags = ["--dataloader-inter-document-masking"]
    run_ranks(2, train_through_a_script, str(tmp_path / "pretrain_gpt.py"), flags, path, timeout=120)


def pack(offsets: list[int], **changes: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    longest = max(hi - lo for lo, hi in pairwise(offsets))
    given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return PackedSeqParams(**{"qkv_format": "thd", **given, **changes})


def forward(options: MegatronConfig, params: Any, tokens: int, rows: int = 1, **config: Any) -> torch.Tensor:
    """A model on tokens that are the same for the same seed, whatever the pack."""
    from megatron.core import parallel_state

    topology = Topology(cp=parallel_state.get_context_parallel_world_size())
    harness.seed()
    model = harness.make_model(harness.make_config(topology, Case(options), **config), options)
    ids = torch.randint(0, harness.VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(0))
    held = positions("zigzag", tokens * topology.cp, topology.cp, parallel_state.get_context_parallel_rank())
    out: torch.Tensor = model(ids, held[None], None, packed_seq_params=params)
    return out


def refused_on_one_rank(rank: int, world_size: int) -> None:
    harness.start(Topology())
    options = MegatronConfig(data_layout="contiguous")
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    other = torch.tensor([0, 4, 12], dtype=torch.int32)
    for params, message in (
        (pack([0, 5, 12], qkv_format="sbhd"), "format 'sbhd'"),
        (pack([0, 5, 12], local_cp_size=2), "local_cp_size=2 and no cp_group"),
        (pack([0, 5, 12], cu_seqlens_kv=other), "a cu_seqlens_kv other than that"),
        (pack([0, 5, 12], cu_seqlens_q=None), "without cu_seqlens_q"),
        (pack([0, 5, 12], max_seqlen_q=6, max_seqlen_kv=6), "max_seqlen 6.*max_seqlen_q=7"),
        (pack([0, 5, 11]), "it ends at 11"),
        (pack([0, 8, 5, 12]), "it must increase"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            forward(options, params, tokens=12)
    with pytest.raises(UnsupportedError, match="packed documents in 2 rows"):
        forward(options, pack([0, 5, 6]), tokens=6, rows=2)
    want = forward(options, pack([0, 5, 12]), tokens=12)
    assert torch.equal(forward(options, pack([0, 5, 5, 12, 12]), tokens=12), want)  # empty documents
    padded = pack([0, 4, 10], cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends, max_seqlen_q=7)
    assert torch.equal(forward(options, padded, tokens=12), want)
    params = pack([0, 5, 12])
    assert torch.equal(forward(options, params, tokens=12), want)
    params.cu_seqlens_q[1] = 4  # and cu_seqlens_kv, which is the same tensor
    params.max_seqlen_q = 8
    assert not torch.equal(forward(options, params, tokens=12), want)


def test_packs_that_are_not_clear_are_refused_and_padding_belongs_to_its_document() -> None:
    run_ranks(1, refused_on_one_rank)


def refused_on_two_ranks(rank: int, world_size: int) -> None:
    harness.start(Topology(cp=2))
    from megatron.core import parallel_state

    from dfa_megatron.megatron import declare_batch_layout

    with pytest.raises(UnsupportedError, match="data_layout='zigzag' that nobody is known to have sliced by rows"):
        forward(MegatronConfig(data_layout="zigzag"), pack([0, 5, 12]), tokens=6)
    forward(MegatronConfig(data_layout="zigzag"), None, tokens=6)
    declare_batch_layout(parallel_state.get_context_parallel_group(), "zigzag")
    forward(MegatronConfig(data_layout="boundary"), pack([0, 5, 12]), tokens=6)


def test_packs_that_megatron_may_have_sliced_one_by_one_are_refused() -> None:
    run_ranks(2, refused_on_two_ranks)


def attention_put_back(rank: int, world_size: int) -> None:
    harness.start(Topology())
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from dfa_megatron.megatron import spec as specs

    ours = specs.distribute_attention

    def replaced(*args: Any, **kwargs: Any) -> Any:
        spec = ours(*args, **kwargs)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = DotProductAttention
        return spec

    specs.distribute_attention = replaced
    options = MegatronConfig(data_layout="boundary")
    with pytest.raises(UnsupportedError, match="a distributed layer whose core_attention became DotProductAttention"):
        forward(options, None, tokens=12)


def test_a_core_attention_that_something_puts_back_is_refused() -> None:
    run_ranks(1, attention_put_back)


def stage_without_documents(rank: int, world_size: int) -> None:
    harness.start(Topology())
    from dfa_megatron.megatron.script import dfa_flags

    dfa_flags.global_args = lambda: SimpleNamespace(sft=True)
    options = MegatronConfig(data_layout="contiguous")
    forward(options, pack([0, 5, 12]), tokens=12)
    with pytest.raises(UnsupportedError, match="a pipeline stage that was given no packed_seq_params"):
        forward(options, None, tokens=12)


def test_a_stage_that_a_script_does_not_tell_its_documents_is_refused() -> None:
    run_ranks(1, stage_without_documents)
