"""Every request that the Megatron integration refuses, in one table for each moment at which it looks."""

from dfa_megatron.megatron.refusals.calls import CALLS
from dfa_megatron.megatron.refusals.config import CONFIG, check_config
from dfa_megatron.megatron.refusals.data import BATCHES, PACKS
from dfa_megatron.megatron.refusals.model import LAYERS, SPEC
from dfa_megatron.megatron.refusals.scripts import ARGS, LAUNCH
from dfa_megatron.megatron.refusals.selfcheck import SELFCHECK

STAGES = (LAUNCH, ARGS, SPEC, CONFIG, LAYERS, BATCHES, PACKS, CALLS, SELFCHECK)

__all__ = [
    "ARGS",
    "BATCHES",
    "CALLS",
    "CONFIG",
    "LAUNCH",
    "LAYERS",
    "PACKS",
    "SELFCHECK",
    "SPEC",
    "STAGES",
    "check_config",
]
