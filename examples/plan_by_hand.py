"""Make a plan, change who computes two blocks, check it, and run it.

python examples/plan_by_hand.py                                # all ranks in this process, naively
torchrun --nproc-per-node 4 examples/plan_by_hand.py           # a process for each
"""

import os

import torch
import torch.distributed as dist

from dfa_megatron import check_plan, dist_flash_attn_func, draw, make_plan, masks, naive, with_blocks

RANKS, TOKENS = 4, 64
plan = make_plan(masks.causal(TOKENS), RANKS, schedule="ring")  # rank 3 computes four blocks, and rank 0 one
given_away = [block for block in plan.forward.blocks if block.rank == 3 and block.step in (1, 2)]
plan = with_blocks(plan, [b._replace(rank=0) if b in given_away else b for b in plan.forward.blocks])
check_plan(plan)  # every pair of the mask once, every result at its owner, no memory touched in flight
print(draw(plan, phase="forward"))

torch.manual_seed(0)
q, k, v = torch.randn(3, 1, TOKENS, 8, 16, dtype=torch.float64)  # each (batch, tokens, heads, head_dim)
a, b, c = (x.transpose(1, 2) for x in (q, k, v))  # as PyTorch takes them
want = torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True).transpose(1, 2)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    mine = slice(dist.get_rank() * TOKENS // RANKS, (dist.get_rank() + 1) * TOKENS // RANKS)
    out = dist_flash_attn_func(q[:, mine], k[:, mine], v[:, mine], plan=plan)
    want = want[:, mine]
else:
    queries, keys, values = (x.chunk(RANKS, dim=1) for x in (q, k, v))
    out = torch.cat([out for out, _ in naive.forward(plan, queries, keys, values, scale=16**-0.5)], dim=1)
torch.testing.assert_close(out, want)
print("equal to attention over the whole sequence")
