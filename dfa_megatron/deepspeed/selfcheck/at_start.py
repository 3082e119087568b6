"""The block's key `selfcheck`: the self-check of a run's own JSON and model, once, before its engine is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dfa_megatron.deepspeed.json_block import DeepSpeedOptions
from dfa_megatron.deepspeed.mesh import Mesh
from dfa_megatron.huggingface.distribute import transformers_model

_DONE: list[tuple[str, str]] = []
"""What this process has checked: the JSON and the model's config. A second engine of the same is not checked again."""


def check_if_asked(model: torch.nn.Module, settings: Mapping[str, Any], block: DeepSpeedOptions, mesh: Mesh) -> None:
    """Run the check where the block asks for it; a collective call of all ranks.

    Raises:
        SelfCheckError: something differs, on every rank, with the table.
        UnsupportedError: the configuration cannot be checked.
    """
    if not block.selfcheck:
        return
    from dfa_megatron.deepspeed.selfcheck.command import make_case
    from dfa_megatron.selfcheck.at_start import check_at_start

    config = transformers_model(model).config
    key = (str(settings), str(config))
    if key in _DONE:
        return
    _DONE.append(key)
    check_at_start(lambda: make_case(settings, block, config, mesh.size, mesh.data_size))
