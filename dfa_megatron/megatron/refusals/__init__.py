"""Every request that the Megatron integration refuses, in one table for each moment at which it looks."""

from dfa_megatron.megatron.refusals.model_build import LAYERS, SPEC
from dfa_megatron.megatron.refusals.model_config import CONFIG, check_config
from dfa_megatron.megatron.refusals.own_groups import OWN_GROUPS
from dfa_megatron.megatron.refusals.packs import BATCHES, PACKS
from dfa_megatron.megatron.refusals.proof_of_job import PROOF
from dfa_megatron.megatron.refusals.running_model import CALLS
from dfa_megatron.megatron.refusals.script_flags import ARGS, LAUNCH

STAGES = (LAUNCH, ARGS, SPEC, CONFIG, LAYERS, BATCHES, PACKS, OWN_GROUPS, CALLS, PROOF)

__all__ = [
    "ARGS",
    "BATCHES",
    "CALLS",
    "CONFIG",
    "LAUNCH",
    "LAYERS",
    "OWN_GROUPS",
    "PACKS",
    "PROOF",
    "SPEC",
    "STAGES",
    "check_config",
]
