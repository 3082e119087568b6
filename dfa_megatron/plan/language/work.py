"""What work takes, in one unit, and the other numbers of plans and launches that were tuned; each says what by.

The unit is a pair of one query head, forward and backward together: a launch takes as long as LAUNCH pairs. Rates and
links of machines are data, in `plan.cost.hardware`, and degrees of exchanged heads a table, in `plan.degree`. What was
"seen" has no raw file; files are those of benchmarks/results. An estimate is one of `plan.cost`.
"""

from __future__ import annotations

LAUNCH = 1 << 20
"""A launch by itself, with what it does once. Seen on one H100: trees and packs with more and with fewer launches."""

ROW = 600
"""A query row, which is read, written and merged. Seen on one H100: documents of 1K to 32K rows agree within 10 %."""

KEY = 380
"""A key row, for its own heads alone: its gradients are summed in float32. Seen on one H100, as GATHER."""

GATHER = 280
"""A key row more that is copied, its gradients summed from the copies. Documents in blocks:
2026-11-27-1xh100-masks.json.
"""

MOVED = LAUNCH / 1200
"""A key row from another rank, for four query heads; a query row, with its results, is as much for each of them.
Between links: 315 pairs by the rates of NVLink, 4,100 without peer access (2026-11-22-2xh200-p2p-off-flash4.json).
"""

FAR = 2048
"""Rows that take longer than another launch: the largest gap between segments of one, and the longest document whose
keys are copied. Seen on two H200; documents in blocks: 2026-11-27-1xh100-masks.json.
"""

TILE = 128
"""Rows of a kernel's tile on Hopper, of which half are in vain on a diagonal. Fits heads of
2026-11-22-2xh200-p2p-off-heads-flash4.json.
"""

SLOWER = 1 / 12
"""How much longer a causal launch takes for pairs of full tiles than a full one, whose tiles are larger. Seen on one
H100: eight rollouts behind a long prompt take 22.3 ms joined and 21.9 apart.
"""

MOST_COPIES = 0.75
"""The most keys that a launch copies, with their heads, in query rows: memory. Without it a document of 128K tokens in
blocks of 1,024 took 34 GB on one H100.
"""

EVEN = 0.03
"""Work of a rank above the mean, as a share of it, that counts as even. By estimates; imbalance and time of packs:
2026-11-22-4xh200-packed.json.
"""

TIE = 0.02
"""Share by which times of plans differ in a tie: runs of one plan do, in 2026-11-22-2xh200-schedules-flash4.json."""

WHOLE = 1 / 8, 1 / 32, 1.0, float("inf")
"""Shares of a rank's work up to which `load_balanced` keeps a document whole: as a rule, where work is uneven, and
where messages take longer than work. By estimates of packs.
"""

CUTS = 4
"""Cuts of a rank's tokens: two for a document that begins or ends on a rank, two for a window. Planning time."""

WORTH_CUTTING = 0.1
"""Share of remote rows that cuts must save. Estimates of what saves less change by 1 %, and planning takes twice as
long on 64 ranks.
"""

ROWS_PER_STEP = 2.0
"""Remote rows and keys that a rank reads in a step, in rows of its own: memory, and few waits. Packs on four H200:
2026-11-22-4xh200-packed.json.
"""
