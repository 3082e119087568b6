"""The block's key `selfcheck`: check a run's own JSON and model once, before its engine is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from dfa_megatron.deepspeed.mesh import Mesh
from dfa_megatron.huggingface.distribute import transformers_model
from dfa_megatron.selfcheck.at_start import check_at_start


def check_if_asked(model: torch.nn.Module, settings: Mapping[str, Any], block: DeepSpeedOptions, mesh: Mesh) -> None:
    """Run the check where the block asks for it; a collective call of all ranks.

    Raises:
        SelfCheckError: something differs, on every rank, with the table.
        UnsupportedError: the configuration cannot be checked.
    """
    if not block.selfcheck:
        return
    from dfa_megatron.deepspeed.selfcheck.command import make_case

    config = transformers_model(model).config
    check_at_start(f"{settings} {config}", lambda: make_case(settings, block, config, mesh.size, mesh.data_size))
