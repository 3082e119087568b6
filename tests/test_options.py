"""docs/options.md lists every option as the code has it."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import fields
from pathlib import Path

import dfa_megatron
from dfa_megatron.config import DistAttentionConfig

DOCS = Path(__file__).parents[1] / "docs"


def test_the_table_is_that_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("update_options", DOCS / "update_options.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run `python docs/update_options.py`"


def test_the_options_that_the_page_calls_megatrons_are_those_that_the_function_does_not_take() -> None:
    taken = set(inspect.signature(dfa_megatron.dist_flash_attn_func).parameters)
    known = {field.name for field in fields(DistAttentionConfig)}
    assert known - taken == {"data_layout", "remat", "remat_offload", "checkpoint"}
