"""Every name that is replaced stands on its page, and can be put back."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from dfa_megatron import hooks
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.huggingface.hook_mixers import FUSED, STANDS_IN
from tests.support.close import assert_close
from tests.support.models import build, text
from tests.support.pages import ROOT

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}),
    ("Mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1}),
)
BY_CONFIG = {"__post_init__", "__init__"}


def test_names_that_are_replaced_stand_on_the_page_and_are_put_back() -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    batch, models = text(1, 12, seed=1), [build(kind, **changes) for kind, changes in KINDS]
    homes = [vars(sys.modules[type(model).__module__]) for model in models]
    hooks.restore()
    before = [dict(home) for home in homes]
    wanted = [model(**batch).loss for model in models]
    distributed = [dfa_hf.distribute_attention(build(kind, **changes)) for kind, changes in KINDS]
    dfa_hf.add_cp_backend()
    names = {name.rpartition(".")[2] for name in hooks.replaced()}
    assert {"load_balancing_loss_func", "mamba2_chunk_scan", *BY_CONFIG} <= names
    every = {*STANDS_IN, *FUSED, "load_balancing_loss_func", *BY_CONFIG}
    assert names <= every
    assert len(every) == 9
    assert all(f"`{name}`" in page for name in (*every, "deepspeed.initialize"))
    hooks.restore()
    assert hooks.replaced() == []
    assert all(home[name] is own for home, names in zip(homes, before, strict=True) for name, own in names.items())
    for model, want in zip(models, wanted, strict=True):
        assert torch.equal(model(**batch).loss, want)
    for model, want, said in zip(distributed, wanted, ("did not reach ours", "that did not reach"), strict=True):
        with pytest.raises(UnsupportedError, match=said):
            model(**batch)
        assert_close(dfa_hf.distribute_attention(model)(**batch).loss, want, tolerance=1e-5, name="distributed again")
