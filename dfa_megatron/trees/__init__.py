"""From rollouts to packs in which each shared prefix stands once, and from numbers of tokens back to rollouts."""

from dfa_megatron.trees.rollouts import from_rollouts
from dfa_megatron.trees.tree_pack import TreePack

__all__ = ["TreePack", "from_rollouts"]
