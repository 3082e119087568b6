"""Every name of Megatron's that is replaced stands on its page, and can be put back."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dfa_megatron.megatron
from dfa_megatron import hooks
from dfa_megatron.config import MegatronConfig
from dfa_megatron.errors import UnsupportedError
from tests.support.pages import ROOT


def test_every_name_that_is_replaced_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in Path(dfa_megatron.megatron.__path__[0]).rglob("*.py"))
    names = {
        name for pair in re.findall(r'replace\(\w+, f?"(\w+)"|replaced = \{"(\w+)"', code) for name in pair if name
    }
    assert {"roll_tensor", "__init__", "z_loss_func", "train_step", "causal_conv1d"} <= names
    assert all(f"`{name}`" in page for name in names)
    table = page.partition("## Megatron-Core")[2].partition("## DeepSpeed")[0]
    assert table.count("\n| `") == 11


def test_names_that_were_replaced_are_put_back() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from dfa_megatron.megatron import in_order, spec

    hooks.restore()
    modules: dict[str, Any] = {name: module for name, module in sys.modules.items() if name.startswith("megatron.")}
    before, own = {name: dict(vars(module)) for name, module in modules.items()}, LanguageModule.__init__
    spec._replace_names(MegatronConfig(verify="on"))
    in_order._replace_calls()
    replaced = {name.rpartition(".")[2] for name in hooks.replaced()}
    assert {"roll_tensor", "__init__"} <= replaced
    assert LanguageModule.__init__ is not own
    hooks.restore()
    assert hooks.replaced() == []
    assert LanguageModule.__init__ is own
    for home, names in before.items():
        assert all(vars(modules[home]).get(name) is value for name, value in names.items()), home


@pytest.mark.parametrize("kind", ["module", "class", "subclass"])
def test_a_name_that_is_not_there_is_never_put_there(kind: str) -> None:
    base = type("Base", (), {"there": 1})
    owner, name = {"module": (ModuleType("theirs"), "gone"), "class": (base, "gone")}.get(
        kind, (type("Sub", (base,), {}), "there")
    )
    before, listed = dict(vars(owner)), hooks.replaced()
    with pytest.raises(UnsupportedError, match=rf"a version without \w+\.{name}"):
        hooks.replace(owner, name, print)
    assert (dict(vars(owner)), hooks.replaced()) == (before, listed)
