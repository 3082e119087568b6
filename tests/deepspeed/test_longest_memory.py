"""The account of the longest sequence's memory has the bytes of a token that a model of each family has."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dfa_megatron import DistAttentionConfig
from dfa_megatron.huggingface import distribute_attention
from dfa_megatron.testing.workers import run_ranks
from tests.deepspeed import harness

WIDTHS = {"hidden": 192, "intermediate": 16, "heads": 4, "kv_heads": 2, "head_dim": 32}
LAYERS, WORDS, TILES = 3, 32, 8


class Held(TorchDispatchMode):
    """Count the bytes of tensors that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.known:
                self.known[key] = x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self.known.pop, key, 0)
        self.peak = max(self.peak, sum(self.known.values()))
        return made


def peaks(rank: int, ranks: int, family: str) -> float:
    """Bytes that a token more adds to the peak of a forward and backward."""
    harness.prepare_worker(rank)
    import deepspeed_common as common
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=WORDS, hidden_size=WIDTHS["hidden"], intermediate_size=WIDTHS["intermediate"],
        num_hidden_layers=LAYERS, num_attention_heads=WIDTHS["heads"], num_key_value_heads=WIDTHS["kv_heads"],
        head_dim=WIDTHS["head_dim"], attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).train()
    distribute_attention(model, config=DistAttentionConfig(checkpoint="remat"))
    training, found = common.Training(model, "all"), {}
    training.tiles = TILES
    for rows in (256, 256, 512):
        ids = torch.arange(rows)[None] % WORDS
        with Held() as held:
            loss = training(input_ids=ids, position_ids=torch.arange(rows)[None], shift_labels=ids, group=None)
            loss.backward()
        found[rows] = held.peak
        training.zero_grad()
    return (found[512] - found[256]) / 256


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_the_account_has_the_bytes_of_a_token_that_were_counted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import deepspeed_common as common
    import deepspeed_memory

    shape = common.Shape(**WIDTHS, family=family)
    of_layer = max(deepspeed_memory.recomputed(shape, 1).values()) + (LAYERS - 1) * deepspeed_memory.kept(shape)
    (counted,) = run_ranks(1, peaks, family)
    assert counted == pytest.approx(of_layer, rel=0.01)
    lengths = {"on_host": False, "offload": True, "stages": 1, "tile": 64}
    one, two = (max(deepspeed_memory.account(shape, LAYERS, WORDS, n, **lengths).values()) for n in (2**20, 2**21))
    assert (two - one) * 2**10 == pytest.approx(of_layer)
