"""Every request that the integration with DeepSpeed refuses: it contradicts the block, or no test compared it."""

from dfa_megatron.deepspeed.refusals.engine_calls import CALL, ENGINE, SELFCHECK
from dfa_megatron.deepspeed.refusals.json_keys import BLOCK, SETTINGS, check_settings, check_sizes

STAGES = (CALL, BLOCK, SETTINGS, ENGINE, SELFCHECK)

__all__ = ["BLOCK", "CALL", "ENGINE", "SELFCHECK", "SETTINGS", "STAGES", "check_settings", "check_sizes"]
