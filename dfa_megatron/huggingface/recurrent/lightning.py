"""Lightning attention (MiniMax-01) over ranks: its states decay by a number per head that does not depend on tokens.

Its layer computes all in its own forward, from zero, in blocks. The same is written here with a recurrence between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dfa_megatron.huggingface.recurrent.stand_ins import Keywords, Real
from dfa_megatron.kernels.api import accumulator_dtype
from dfa_megatron.recurrence import Decay, Scan, dist_scan
from dfa_megatron.runtime.cu_seqlens import Offsets


def lightning(real: Real, options: Keywords, given: Keywords) -> tuple[torch.Tensor, None]:
    """Compute a layer's forward, given as a function of itself and hidden_states (batch, local_seq, hidden)."""
    module = given["self"]

    def run(x: dict[str, torch.Tensor], state: torch.Tensor | None, documents: Offsets) -> Any:
        return _blocks(module, *(x[name].transpose(1, 2) for name in "qkv"))

    hidden, mask = given["hidden_states"], given.get("attention_mask")  # (batch, local_seq) or None
    qkv = module.act_fn(module.qkv_proj(hidden)).unflatten(2, (module.num_attention_heads, 3, -1))
    qkv = qkv if mask is None else qkv * mask[:, :, None, None, None].to(qkv.dtype)
    q, k, v = qkv.unbind(3)
    log = module.slope_rate.to(accumulator_dtype(q.dtype)).flatten().neg().expand(q.shape[:3])
    out, _ = dist_scan(Scan(run, "k", "v"), {"q": q, "k": k, "v": v}, decay=Decay(q, log), **options)
    out = module.norm(out.flatten(2))
    return module.out_proj(F.sigmoid(module.output_gate(hidden)) * out), None


def _blocks(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, state) of one document as the layer computes it; q, k and v are (batch, heads, tokens, head_dim)."""
    outs, state = [], q.new_zeros((*q.shape[:2], q.shape[3], v.shape[3]))
    for q_block, k_block, v_block in zip(*(x.split(module.block_size, 2) for x in (q, k, v)), strict=True):
        tokens = q_block.shape[2]
        near = q_block @ k_block.mT * module.diagonal_decay[:, :, :tokens, :tokens]
        outs.append(q_block * module.query_decay[:, :tokens] @ state + near @ v_block)
        added = (k_block * module.key_decay[:, -tokens:]).mT @ v_block
        state = state * torch.exp(-module.slope_rate * tokens) + added
    return torch.cat(outs, 2).transpose(1, 2), state
