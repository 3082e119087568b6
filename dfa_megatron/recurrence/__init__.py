"""Linear recurrences over contiguous tokens of a sharded sequence: linear attention, state spaces, delta rules.

Over a rank's tokens a linear recurrence is affine in the state that comes in: `S_out = M S_in + S_local`. Ranks gather
(M, S_local) once, and each folds what came before it (LASP-2, arXiv:2502.07563, for any M). The backward mirrors it.

dist_scan       a recurrence whose kernel takes and returns states
dist_mamba2, dist_mamba1, fla_scan      the kernels of mamba-ssm and flash-linear-attention, handed over
dist_conv       a short causal convolution
token_loop      every recurrence as a loop over tokens, for tests
"""

from dfa_megatron.recurrence.functions import Convolve, dist_conv, dist_scan
from dfa_megatron.recurrence.local_scan import Decay, Run, Scan
from dfa_megatron.recurrence.passing import Place
from dfa_megatron.recurrence.upstream import dist_mamba1, dist_mamba2, fla_scan

__all__ = [
    "Convolve",
    "Decay",
    "Place",
    "Run",
    "Scan",
    "dist_conv",
    "dist_mamba1",
    "dist_mamba2",
    "dist_scan",
    "fla_scan",
]
