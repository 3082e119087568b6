"""What `prove` refuses."""

from __future__ import annotations

from dfa_megatron.refusals import Stage, stated

PROOF = Stage(
    "Megatron: when a job is proved",
    (
        stated(
            "no_wrapper",
            "prove of a {no_wrapper} without Megatron's DistributedDataParallel",
            "its gradients are compared as that reduces them",
            "prove of the model in megatron.core.distributed.DistributedDataParallel",
            "GPTModel",
        ),
    ),
)
