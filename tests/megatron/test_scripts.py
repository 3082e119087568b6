"""Megatron's own parser, builders, slicing and datasets, as its scripts call them: a model trains like one rank.

The parser takes every argument file of configs/megatron, with and without the launcher's flags.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dfa_megatron import launch
from dfa_megatron.megatron import DistributedAttentionLayer, DistributedCoreAttention, shard_batch
from dfa_megatron.megatron.check_config import check_config
from dfa_megatron.megatron.output import tile_of
from dfa_megatron.megatron.script.dfa_flags import add_dfa_arguments, options_of
from dfa_megatron.runtime.counters import COUNTERS
from tests.frameworks import megatron_harness as harness
from tests.frameworks.megatron_rows import like
from tests.fuzz.frameworks.one_rank import apart
from tests.support.megatron_model import set_weights
from tests.support.workers import run_ranks

pytestmark = pytest.mark.skipif(find_spec("megatron.training") is None, reason="no training package is installed")

CONFIGS = Path(__file__).parents[2] / "configs" / "megatron"
FLAGS = """
--transformer-impl local --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --ffn-hidden-size 128 --seq-length 48 --max-position-embeddings 48 --micro-batch-size 2
--train-iters 1 --lr 1e-3 --context-parallel-size 2 --attention-dropout 0.0 --hidden-dropout 0.0
--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
--no-persist-layer-norm --use-cpu-initialization --no-gradient-accumulation-fusion --no-bias-dropout-fusion
--no-masked-softmax-fusion --no-rope-fusion --no-create-attention-mask-in-dataloader --tokenizer-type NullTokenizer
--vocab-size 62 --make-vocab-size-divisible-by 1 --distributed-backend gloo
"""
OURS = "--cp-comm-type dfa --spec dfa_megatron.megatron get_spec"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


PACKED = like("packed", {"cp": 2}, batch=2, dtype="float32 of few layers")
PLAIN = like("plain", {"cp": 2}, batch=2, dtype="float32 of few layers", masks=PACKED.masks)
MICRO_BATCHES, SEQUENCE = len(PLAIN.masks), PLAIN.tokens


def as_launched(ranks: int = 0) -> None:
    """What a launcher of so many ranks, or of these, would have set, and device queries that CPU cannot answer."""
    size = str(ranks or dist.get_world_size())
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=size, CUDA_DEVICE_MAX_CONNECTIONS="1")
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")


def started() -> None:
    """Forget what an earlier script set."""
    from megatron.training import global_vars

    global_vars.unset_global_variables()
    as_launched()
    harness.start(PLAIN)


def build(flags: str, provider: Any) -> tuple[Any, Any]:
    """What pretrain_gpt.py does up to the model."""
    started()
    sys.argv = ["pretrain_gpt.py", *flags.split()]
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=provider)
    config = gpt_config_from_args(args)
    builder = config.get_builder_cls()(config)
    return args, builder.build_model(ProcessGroupCollection.use_mpu_process_groups())


FLAGGED = (
    ("", None, "boundary"),  # an unmodified script
    ("--dfa-data-layout zigzag", add_dfa_arguments, "zigzag"),
    ("--dfa-data-layout contiguous --dfa-schedule ring", add_dfa_arguments, "contiguous"),
)


def train_from_flags(rank: int, world_size: int) -> None:
    wanted = harness.step(PLAIN.alone()).loss
    for flags, provider, layout in FLAGGED:
        args, model = build(f"{FLAGS} {OURS} {FULL} {flags}", provider)
        options = options_of()
        assert options.data_layout == layout
        for layer in model.decoder.layers:
            assert isinstance(layer, DistributedAttentionLayer)
            assert isinstance(layer.self_attention.core_attention, DistributedCoreAttention)
            assert layer.self_attention.core_attention.options == options
        assert args.recompute_granularity == "full"
        assert model.config.recompute_granularity == "full", "the config is the caller's"
        set_weights(model)
        COUNTERS.reset()
        total, group = torch.zeros(()), parallel_state.get_context_parallel_group()
        for micro in range(MICRO_BATCHES):
            batch = shard_batch(batch_of_rows(micro), group, options)
            loss = share_of_loss(model(**batch), batch)
            loss.backward()
            total += loss.detach()
        assert model.decoder.config.recompute_granularity is None, "full recomputation is taken over"
        dist.all_reduce(total)
        assert abs(total.item() - wanted) <= 1e-5
        attentions = 2 * MICRO_BATCHES
        assert (COUNTERS.attention_forwards, COUNTERS.reused) == (attentions, attentions)


def batch_of_rows(micro: int) -> dict[str, torch.Tensor]:
    return {name: x for name, x in PLAIN.global_batch(0)[micro].items() if name != "cu_seqlens"}


def share_of_loss(losses: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """This rank's part of the mean loss, where every micro-batch counts alike."""
    count = [int(whole["loss_mask"].sum()) for whole in HERE.row.global_batch(0)]
    share: torch.Tensor = (losses.float() * batch["loss_mask"]).sum() / sum(count)
    return share


HERE = SimpleNamespace(row=PLAIN, batch_of=None, loss_of=share_of_loss, total=None, model=None, args=None)
"""The row that the script trains on, its data and loss, and its total loss, model and arguments."""

# What pretrain_gpt.py of Megatron-LM 0.19 does between its loader and its model, without CUDA and an optimizer. The
# slicing is called as that script calls it.
SCRIPT = """
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import flatten_batch_for_packed_sequences, get_batch_on_this_cp_rank
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_and_validate_args
from tests.megatron import test_scripts
from tests.support.megatron_model import set_weights

ABSENT = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group", "attention_mask")

if __name__ == "__main__":
    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    set_weights(model)
    here = test_scripts.HERE
    total = torch.zeros(())
    for micro in range(test_scripts.MICRO_BATCHES):
        batch = {**dict.fromkeys(ABSENT), **here.batch_of(micro)}
        packed = batch["cu_seqlens"] is not None
        batch = get_batch_on_this_cp_rank(
            flatten_batch_for_packed_sequences(batch) if packed else batch,
            is_hybrid_cp=args.hybrid_context_parallel, cp_group=parallel_state.get_context_parallel_group(),
            use_per_sequence_balancing=args.dataloader_inter_document_masking and not args.sft)
        params = None
        if packed:
            offsets, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"][0])
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets,
                                     max_seqlen_q=longest, max_seqlen_kv=longest)
        loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=params)
        loss = here.loss_of(loss, batch)
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    here.total, here.model, here.args = total.item(), model, args
"""


def packed_batch(micro: int) -> dict[str, torch.Tensor]:
    whole = PACKED.global_batch(0)[micro]
    return {**whole, "max_seqlen": whole["cu_seqlens"].diff(dim=1).max(1).values}


def train_through_scripts(script: str) -> str:
    """What the script's help says; it trains on rows and on packs."""
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit, match="0"):
        launch.main([script, "--help"])
    plain, packed = ["--dfa-loss-tile", "7"], ["--dataloader-inter-document-masking"]
    for row, more, batch_of in ((PLAIN, plain, batch_of_rows), (PACKED, packed, packed_batch)):
        wanted = harness.step(row.alone()).loss
        started()
        HERE.row, HERE.batch_of, HERE.loss_of = row, batch_of, share_of_loss
        assert launch.main([script, *FLAGS.split(), *OURS.split(), *FULL.split(), *more]) == 0
        assert HERE.args.dfa_data_layout == "boundary"
        assert tile_of(HERE.model) == (7 if row is PLAIN else None)
        assert abs(HERE.total - wanted) <= 1e-5
    return shown.getvalue()


LENGTHS = ((5, 3, 21), (9, 60), (1, 2, 4, 13), (46, 7))
"""Characters of the conversations in every sample; the second and the last are too long for it."""


class Tokenizer:
    """As Megatron's SFT tokenizers, a token a character; the first of a conversation counts as a prompt."""

    eod, pad = 1, 0

    def tokenize_conversation(self, conversation: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor(list("".join(message["content"] for message in conversation).encode()))
        return tokens, torch.cat((torch.tensor([-100]), tokens[1:]))


def conversations(ranks: int) -> Any:
    """Megatron's SFTDataset, which pads each to 2 x CP tokens, as its command line makes it for these ranks."""
    from megatron.training.datasets import sft_dataset

    def keep(self: Any, dataset: Any, path: Any, indices: Any, samples: int, split: Any, config: Any) -> None:
        vars(self).update(dataset=dataset, indices=indices, num_samples=samples, config=config)

    sft_dataset.MegatronDataset.__init__ = keep
    config = SimpleNamespace(context_parallel_size=ranks, tokenizer=Tokenizer(), sequence_length=SEQUENCE)
    config.reset_position_ids = config.create_attention_mask = config.reset_attention_mask = False
    digits = "".join(map(str, torch.randint(10, (100,), generator=torch.Generator().manual_seed(4)).tolist()))
    samples = [
        [{"role": "system", "content": digits[at : at + length]} for at, length in enumerate(row)] for row in LENGTHS
    ]
    made = sft_dataset.SFTDataset(samples, None, list(range(len(samples))), len(samples), None, config=config)
    assert config.context_parallel_size == ranks
    return made


def masked(losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the losses that count."""
    return (losses.flatten() * batch["loss_mask"].flatten()).sum()


def partitioned(cu_seqlens: torch.Tensor, total: int, ranks: int, rank: int) -> torch.Tensor:
    """Stand in for Transformer Engine's thd_get_partitioned_indices."""
    assert int(cu_seqlens[-1]) == total
    documents = [torch.arange(lo, hi).chunk(2 * ranks) for lo, hi in pairwise(cu_seqlens.tolist()) if hi > lo]
    return torch.cat([chunks[at] for chunks in documents for at in (rank, 2 * ranks - 1 - rank)])


def train_by_sft(ranks: int, script: str) -> None:
    """An unchanged script without our launcher: Megatron's own flags alone, against one rank of its own attention."""
    import megatron.core.utils

    def batch_of(micro: int) -> Any:
        samples = conversations(ranks)
        return torch.utils.data.default_collate([samples[micro * PACKED.batch + row] for row in range(PACKED.batch)])

    alone = PACKED.alone()
    harness.start(alone)
    model = harness.model_of(alone)
    total = torch.zeros(())
    for micro in range(MICRO_BATCHES):
        batch = batch_of(micro)
        flat = {name: batch[name].reshape(1, -1) for name in ("tokens", "labels", "position_ids", "loss_mask")}
        with apart():
            loss = masked(harness.alone(alone, {**flat, "ends": harness.ends_of(batch)}, model), batch)
            loss.backward()
        total += loss.detach()
    assert total > 0

    started()
    HERE.batch_of, HERE.loss_of = batch_of, masked
    sys.argv = [script, *FLAGS.split(), *OURS.split(), *FULL.split(), "--sft"]
    engine = SimpleNamespace(thd_get_partitioned_indices=partitioned)
    with patch.object(megatron.core.utils, "tex", engine, create=True):
        runpy.run_path(script, run_name="__main__")
    assert abs(HERE.total - total) <= 1e-5 * total
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in HERE.model.named_parameters():
        dist.all_reduce(parameter.grad)
        assert (parameter.grad - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name


def by_flags(rank: int, ranks: int, script: str) -> str:
    """Flags alone, before the launcher adds its own."""
    train_from_flags(rank, ranks)
    train_by_sft(ranks, script)
    return train_through_scripts(script)


@pytest.mark.support("megatron", "Megatron's training package through the launcher")
@pytest.mark.support("megatron", "packed data of Megatron's scripts and datasets")
def test_scripts_by_flags_alone_and_through_the_launcher_train_like_one_rank_on_rows_packs_and_conversations(
    tmp_path: Path,
) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    shown = run_ranks(2, by_flags, str(tmp_path / "pretrain_gpt.py"), timeout=170)[0]
    assert "--context-parallel-size" in shown
    assert "--dfa-data-layout {contiguous,boundary,zigzag}" in shown


def parsed(words: list[str], ranks: int, provider: Any = None) -> Any:
    """The arguments that Megatron's own parser and checks make of these, on so many ranks."""
    from megatron.training.arguments import parse_args, validate_args

    as_launched(ranks)
    sys.argv = ["pretrain_gpt.py", *words]
    args = parse_args(provider)
    validate_args(args, {})
    return args


def every_argument_file(rank: int, world_size: int) -> None:
    """With those of a training, and the command of docs/prove.md."""
    from megatron.training.arguments import core_transformer_config_from_args

    page = (CONFIGS.parents[1] / "docs" / "prove.md").read_text(encoding="utf-8")
    command = page.partition("pretrain_gpt.py")[2].partition("```")[0].replace("\\\n", " ")
    args = parsed(launch.expand(command.replace("$args", str(CONFIGS)).split()), 8, add_dfa_arguments)
    assert args.dfa_prove
    assert (args.num_layers, args.context_parallel_size, args.seq_length) == (2, 8, 4096)
    for path in CONFIGS.glob("*.args"):
        model = launch.read_arguments(path)
        for training, more, provider, layout in (
            ("mock", [], None, "boundary"),
            ("pretrain", ["--dfa-data-layout", "zigzag"], add_dfa_arguments, "zigzag"),
        ):
            words = [*model, *launch.read_arguments(CONFIGS / "training" / f"{training}.args"), *more]
            args = parsed(words, int(model[model.index("--context-parallel-size") + 1]), provider)
            assert args.spec[0] == "dfa_megatron.megatron"
            assert args.data_parallel_size == 1
            assert options_of(args).data_layout == layout
            args.apply_rope_fusion = False  # which needs Transformer Engine
            check_config(core_transformer_config_from_args(args), options_of(args))


def test_megatrons_parser_and_checks_take_every_argument_file_and_the_small_model_of_the_page() -> None:
    run_ranks(1, every_argument_file)
