"""The launcher on Megatron's own training package: a script trains like one rank, and its help shows our flags."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dfa_megatron import launch
from tests.megatron import harness
from tests.megatron.test_launch import SEEN
from tests.support.workers import run_ranks

needs_training = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None, reason="this megatron-core has no training package"
)

# What pretrain_gpt.py of Megatron-LM 0.19 does with its flags, its data and its model, without CUDA and without an
# optimizer. The slicing is called as that script calls it.
SCRIPT = """
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import parse_and_validate_args
from tests.megatron import harness, test_launch

if __name__ == "__main__":
    args = parse_and_validate_args()
    config = gpt_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    harness.set_weights(model)
    total = torch.zeros(())
    for micro in range(harness.MICRO_BATCHES):
        batch = {**harness.micro_batch(0, micro), "cu_seqlens": None, "cu_seqlens_padded": None, "max_seqlen": None,
                 "local_cp_size": None, "hybrid_cp_group": None, "attention_mask": None}
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=args.hybrid_context_parallel,
                                          cp_group=parallel_state.get_context_parallel_group())
        losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        loss = harness.share_of_loss(losses, batch)
        loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    tiled = type(model.output_layer).__name__.startswith("Tiled")
    test_launch.SEEN.update(total=total.item(), layout=args.dfa_data_layout, tiled=tiled)
"""


def train_through_a_script(rank: int, world_size: int, script_path: str, path: str) -> None:
    from tests.megatron.test_flag_path import FLAGS, FULL, OURS

    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()), CUDA_DEVICE_MAX_CONNECTIONS="1")
    harness.start(harness.Topology(cp=2))
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none")
    assert launch.main([script_path, *FLAGS.split(), *OURS.split(), "--dfa-loss-tile", "7", *FULL.split()]) == 0
    assert SEEN["layout"] == "boundary"
    assert SEEN["tiled"]
    assert abs(SEEN["total"] - torch.load(path, weights_only=True)["losses"][0]) <= 1e-5


@pytest.mark.support("megatron", "Megatron's training package through the launcher")
@needs_training
def test_a_script_on_megatrons_own_training_package_trains_like_one_rank(tmp_path: Path, reference: str) -> None:
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    run_ranks(2, train_through_a_script, str(tmp_path / "pretrain_gpt.py"), reference)


def help_of_a_script(rank: int, world_size: int, script_path: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit, match="0"):
        launch.main([script_path, "--help"])
    return shown.getvalue()


@needs_training
def test_megatrons_own_help_shows_our_flags(tmp_path: Path) -> None:
    (tmp_path / "pretrain_gpt.py").write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    shown = run_ranks(1, help_of_a_script, str(tmp_path / "pretrain_gpt.py"))[0]
    assert "--context-parallel-size" in shown
    assert "--dfa-data-layout {contiguous,boundary,zigzag}" in shown
