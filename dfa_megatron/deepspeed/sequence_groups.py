"""What accelerate and HF Trainer ask DeepSpeed about sequence parallelism, answered without DeepSpeed knowing of any.

They take the groups of a sequence from `deepspeed.utils.groups`, which answers for an "mpu". An engine that is made
with such an mpu scales gradients by ZeRO stage, so ours is put there only while no engine is being made. To every other
question it answers as DeepSpeed does without an mpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from dfa_megatron.deepspeed.mesh import Mesh


class SequenceGroups:
    """An mpu in DeepSpeed's sense, of a mesh; for accelerate, which hands it on to `initialize`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequence."""
        return self.mesh.group

    def get_sequence_parallel_world_size(self) -> int:
        """Their number."""
        return self.mesh.size

    def get_sequence_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.sequence_rank

    def get_data_parallel_group(self) -> Any:
        """All ranks: gradients are averaged over them."""
        from deepspeed.utils import groups

        return groups._clone_world_group()

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    def get_data_parallel_group_ranks(self) -> range:
        """Their ranks."""
        return range(dist.get_world_size())

    def get_model_parallel_world_size(self) -> int:
        """One: a model is not cut."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """The only one."""
        return 0


def publish(view: SequenceGroups | None) -> None:
    """Answer with this view from now on, or with none of ours."""
    from deepspeed.utils import groups

    if view is not None or isinstance(getattr(groups, "mpu", None), SequenceGroups):
        groups.mpu = view


@contextmanager
def unpublished() -> Iterator[None]:
    """Within it DeepSpeed sees no view of ours, so that an engine made in it knows nothing of sequences."""
    from deepspeed.utils import groups

    before = getattr(groups, "mpu", None)
    ours = isinstance(before, SequenceGroups)
    if ours:
        groups.mpu = None
    try:
        yield
    finally:
        if ours and groups.mpu is None:
            groups.mpu = before
