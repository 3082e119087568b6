"""The mesh of an engine: which ranks share its sequences."""

from __future__ import annotations

from typing import Any

from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.mesh import Mesh

ATTRIBUTE = "_dfa_mesh"
"""The attribute of an engine that holds its mesh."""


def mesh_of(engine: Any) -> Mesh:
    """Return the mesh of an engine that `initialize` made with the block enabled.

    Raises:
        UnsupportedError: the engine was made without the block.
    """
    mesh: Mesh | None = getattr(engine, ATTRIBUTE, None)
    if mesh is None:
        raise UnsupportedError(
            "mesh_of an engine without distributed attention",
            "the block dist_flash_attention was missing or not enabled",
            "dfa_megatron.deepspeed.initialize with the block",
        )
    return mesh
