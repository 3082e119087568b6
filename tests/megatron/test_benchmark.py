"""The benchmark of Megatron's layers runs at toy size on CPU, and writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support import state_kernels
from tests.support.workers import run_ranks


def bench(rank: int, world_size: int, arguments: list[str]) -> None:
    from benchmarks import megatron_layers

    state_kernels.install()
    torch.compiler.set_stance("force_eager")  # to compile Megatron's gated norm takes longer than all else here
    megatron_layers.main(arguments)
    compare_with_tensor_parallel(rank, world_size)


def compare_with_tensor_parallel(rank: int, ranks: int) -> None:
    """Outputs and input gradients of one block, by our attention and by Megatron's with all ranks sharing weights."""
    from benchmarks import megatron_layers
    from benchmarks.megatron_common import MODES, arrange, seed

    args = megatron_layers.flags(["--toy", "--depth", "2", "--out", "unused"])
    length, shape = args.blocks()[0]
    found = []
    for name in ("remat", "tp-full"):
        arrange(ranks if MODES[name].tensor else 1)
        seed()
        block, table = megatron_layers.build_layers(args, shape, MODES[name], length, torch.device("cpu"))
        give_weights(block, rank if MODES[name].tensor else 0, ranks if MODES[name].tensor else 1)
        rows = torch.randn(length, 1, shape.hidden_size, generator=torch.Generator().manual_seed(5))
        hidden = rows.chunk(ranks)[rank].clone().requires_grad_()
        out = block.train()(hidden, None, rotary_pos_emb=table)
        out.square().sum().backward()
        found.append((out.detach(), hidden.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert found[0][0].std() > 0.1


def give_weights(block: torch.nn.Module, part: int, parts: int) -> None:
    """Fill a block with one of `parts` shares of the same weights, however they are spread."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in block.named_parameters():
        if "norm" in name:
            continue
        rows, columns = parameter.shape
        if "linear_fc1" in name:  # gate and up, each cut by itself
            whole = torch.randn(2, rows * parts // 2, columns, generator=generator).chunk(parts, 1)[part].flatten(0, 1)
        elif "linear_qkv" in name:
            whole = torch.randn(rows * parts, columns, generator=generator).chunk(parts)[part]
        else:
            whole = torch.randn(rows, columns * parts, generator=generator).chunk(parts, 1)[part]
        parameter.data.copy_(0.2 * whole)


def test_every_mode_and_training_give_figures_and_tensor_parallelism_the_same_layers(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "toy.json"
    modes = ["remat-offload", "none"]
    training = ["remat", "remat-boundary"]
    trained = [f"48:2:1:{mode}" for mode in training]
    layers = ["--toy", "--layers", "48:2:48", "16:qwen3-next", "--out", str(out)]
    run_ranks(2, bench, [*layers, "--modes", *modes, "--train", *trained], timeout=120)
    report = json.loads(out.read_text())
    assert [(result["mode"], result["hybrid"]) for result in report["layers"]] == [
        (mode, hybrid) for hybrid in (False, True) for mode in modes
    ]
    assert all(
        result["ms_per_layer"] > 0 and result["length"] == 48 - 32 * result["hybrid"] for result in report["layers"]
    )
    assert [result["mode"] for result in report["training"]] == training
    for result in report["training"]:
        assert result["tokens_per_second_per_gpu"] > 0
        assert 0 < result["last_loss"] < 10
    first, zigzag = report["training"]
    assert zigzag["first_loss"] == pytest.approx(first["first_loss"], abs=1e-4)
    assert report["machine"]["ranks"] == 2
    assert report["seconds"] > 0
