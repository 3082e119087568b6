"""Packs as Transformer Engine's format thd has them: each document padded to 2 x CP, and cut zigzag by itself."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def total_of(rows: torch.Size, ranks: int, splits: int) -> int:
    """Tokens of a pack, which a pipeline wants to be the same for every micro-batch."""
    step = 2 * ranks * splits
    return -(-(rows.numel() + 14 * step) // step) * step


def cut(batch: dict[str, torch.Tensor], ranks: int, rank: int, total: int, form: int) -> dict[str, Any]:
    """This rank's tokens of a micro-batch, and its PackedSeqParams.

    Padding holds other tokens, which nobody may attend to. form 0: offsets with and without padding, as of --sft and
    Megatron-Bridge. 1: padded offsets alone, as of slime and verl.
    """
    length = batch["tokens"].shape[1]
    ends = torch.unique_consecutive(batch["cu_seqlens"] + torch.arange(len(batch["tokens"]))[:, None] * length).int()
    lengths = ends.diff().tolist()
    rooms = [-(-n // (2 * ranks)) * 2 * ranks for n in lengths]
    rooms[len(rooms) > 1] += 2 * ranks
    rooms[-1] += total - sum(rooms)
    generator = torch.Generator().manual_seed(rooms[0])
    cut: dict[str, Any] = {}
    for name in [name for name in ("tokens", "labels", "loss_mask", "position_ids", "at") if name in batch]:
        parts = []
        if batch[name].dim() == 3:  # places of images, which stay whole
            documents = zip(batch[name].flatten(1).split(lengths, 1), rooms, strict=True)
            parts = [torch.nn.functional.pad(document, (0, room - document.shape[1])) for document, room in documents]
            cut[name] = torch.cat(parts, 1)[:, None]
            continue
        for document, room in zip(batch[name].flatten().split(lengths), rooms, strict=True):
            filling = torch.randint(1, 40, (room - len(document),), generator=generator).to(document.dtype)
            filling = {"loss_mask": filling * 0, "at": filling * 0 - 1}.get(name, filling)
            chunks = torch.cat((document, filling)).chunk(2 * ranks)
            parts += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        cut[name] = torch.cat(parts)[None]
    padded = torch.tensor([0, *accumulate(rooms)], dtype=torch.int32)
    real = padded if form else ends
    more = {} if form else {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    longest = {"max_seqlen_q": max(rooms), "max_seqlen_kv": max(rooms)}
    return {**cut, "params": PackedSeqParams("thd", cu_seqlens_q=real, cu_seqlens_kv=real, **longest, **more)}
