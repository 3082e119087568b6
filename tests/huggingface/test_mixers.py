"""Attention and states are distributed, whatever was copied or renamed; else a forward raises.

Every name that is replaced stands on its page, and can be put back.
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
import sys
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dfa_megatron import hooks
from dfa_megatron import huggingface as dfa_hf
from dfa_megatron.config import TrainingConfig
from dfa_megatron.errors import UnsupportedError
from dfa_megatron.hooks import OWN
from dfa_megatron.huggingface.check_model import CLASSES, TRIED
from dfa_megatron.huggingface.hook_mixers import FUSED, STANDS_IN, listed
from tests.frameworks.compare import assert_gradients, gradients_of
from tests.fuzz.frameworks.steps import check_each
from tests.huggingface import rows
from tests.huggingface.one_process import Float64, assert_loss
from tests.support.close import assert_close
from tests.support.models import build, text
from tests.support.pages import ROOT
from tests.support.workers import over_ranks


def test_layers_that_were_copied_added_or_replaced_are_exact() -> None:
    check_each("transformers", rows.grown())


@over_ranks(3)
def test_rotary_embeddings_that_are_replaced_later_know_the_longest_document(rank: int, ranks: int) -> None:
    batch = text(1, 46, seed=2)
    want, model = (build("Llama", max_position_embeddings=12).double() for _ in range(2))
    dfa_hf.distribute_attention(model)(**batch)
    for each in (want, model):
        each.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
        each.model.rotary_emb = type(each.model.rotary_emb)(each.config)
    assert_close(model(**batch).loss, want(**batch).loss, tolerance=1e-6, name="loss")


def test_an_attention_that_does_not_reach_ours_raises_and_one_that_does_not_run_does_not() -> None:
    model = dfa_hf.distribute_attention(build("Llama"))
    batch = text(1, 8, seed=1)
    model.model.layers[1].forward = lambda hidden, *_, **__: hidden
    model(**batch)
    own = model.model.layers[0].self_attn
    own.config = copy.deepcopy(own.config)
    own.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedError, match="type LlamaAttention that did not reach dfa: it has computed"):
        model(**batch)
    with dfa_hf.local_attention(model):
        model(**text(1, 8, seed=1))


def renamed(layer: torch.nn.Module, name: str) -> Any:
    """Let the forward of a layer's class call a function by another name, as a release might; return what undoes it."""
    kind = type(layer)
    names, was = vars(sys.modules[kind.__module__]), inspect.unwrap(kind.forward)
    source = inspect.cleandoc("\n" + inspect.getsource(was)).replace(name, f"new_{name}")
    names[f"new_{name}"] = getattr(names[name], OWN, names[name])
    here: dict[str, Any] = {}
    exec(compile(source, "<renamed>", "exec"), names, here)  # noqa: S102
    kind.forward = here["forward"]
    return was


@pytest.mark.parametrize("kind", ["qwen3_next", "lfm2"])
def test_a_state_is_never_computed_alone_because_a_function_has_another_name(kind: str) -> None:
    from tests.huggingface.sweep.tiny import build as build_type

    model = build_type(kind)
    layer = next(module for module in model.modules() if listed(module))
    batch = {"input_ids": torch.arange(1, 9)[None]}
    for name in sorted(listed(layer)):
        was = renamed(layer, name)
        try:
            with pytest.raises(UnsupportedError, match=rf"{type(layer).__name__} that did not reach {name}"):
                dfa_hf.distribute_attention(copy.deepcopy(model))(**batch)
        finally:
            type(layer).forward = was
        distributed = dfa_hf.distribute_attention(copy.deepcopy(model))
        names = vars(sys.modules[type(layer).__module__])
        ours, names[name] = names[name], getattr(names[name], OWN)  # another package put it back
        try:
            with pytest.raises(UnsupportedError, match=rf"{type(layer).__name__} that did not reach {name}"):
                distributed(**batch)
        finally:
            names[name] = ours
        distributed(**batch)


def test_every_layer_with_a_state_in_a_tried_type_is_listed() -> None:
    """One that is not may reach nothing of ours, and would not raise. A release may bring such a class."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    known, found = {name for classes in CLASSES.values() for name in classes.split()}, set()
    models = Path(transformers.__file__).parent / "models"
    for file in {x for kind in TRIED for x in (models / model_type_to_module_name(kind)).glob("modeling_*.py")}:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            forwards = [x for x in ast.walk(node) if isinstance(x, ast.FunctionDef) and x.name == "forward"]
            called = {x.id for forward in forwards for x in ast.walk(forward) if isinstance(x, ast.Name)}
            if isinstance(node, ast.ClassDef) and called & {*STANDS_IN, *FUSED}:
                found.add(node.name)
    assert len(found) > 10
    assert found - known == set()


@over_ranks(3, timeout=170)
def test_fsdp2_with_any_policy_of_precision_trains_as_without_us(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for number in range(60, 66):
        dice = random.Random(number)
        batch = text(1, dice.randint(5, 9) * ranks + dice.randint(0, 1), seed=number, unlabelled=2)
        if dice.random() < 0.5:
            batch["position_ids"] = torch.cat([torch.arange(3), torch.arange(batch["input_ids"].shape[1] - 3)])[None]
        dtype = torch.bfloat16 if dice.random() < 0.8 else None
        inner, outer = (
            MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=dice.random() < 0.7) for _ in range(2)
        )
        options = TrainingConfig(checkpoint=dice.choice(["none", "full", "remat"]))
        losses = []
        for distributed in (False, True):
            model = build("Llama", number)
            if distributed:
                dfa_hf.distribute_attention(model, config=options)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=inner)
            fully_shard(model, mesh=mesh, mp_policy=outer)
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            losses.append((loss, torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()))
        near, norm = (1e-5, 1e-5) if dtype is None else (4e-3, 3e-2)  # bfloat16 rounds to 4e-3
        assert_loss(losses[1][0], losses[0][0].detach(), str(number), tolerance=near)
        assert_close(losses[1][1], losses[0][1], tolerance=norm, name=f"{number} norm")


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
    assert len(every) == 10
    assert all(f"`{name}`" in page for name in (*every, "deepspeed.initialize"))
    hooks.restore()
    assert hooks.replaced() == []
    assert all(home[name] is own for home, names in zip(homes, before, strict=True) for name, own in names.items())
    for model, want in zip(models, wanted, strict=True):
        assert torch.equal(model(**batch).loss, want)
    for model, want in zip(distributed, wanted, strict=True):
        with pytest.raises(UnsupportedError, match="that did not reach"):
            model(**batch)
        assert_close(dfa_hf.distribute_attention(model)(**batch).loss, want, tolerance=1e-5, name="distributed again")


def elsewhere(model: Any, names: dict[str, Any]) -> Any:
    """Give a model its own forward from another file, as Liger does; names: of that file."""
    own, file = inspect.unwrap(type(model).forward), ModuleType("elsewhere")
    vars(file).update(own.__globals__, **names, __name__="elsewhere")
    forward = FunctionType(own.__code__, vars(file), "forward", own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    model.forward = MethodType(forward, model)
    return file


def test_a_forward_of_another_file_reaches_ours_or_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    hooks.restore()
    (kind, changes), batch = KINDS[0], text(1, 12, seed=1)
    alone, before, after, trained = (build(kind, **changes) for _ in range(4))
    want, name = alone(**batch).loss, "load_balancing_loss_func"
    theirs = {name: vars(sys.modules[type(alone).__module__])[name]}
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere(before, theirs))
    assert_close(dfa_hf.distribute_attention(before)(**batch).loss, want, tolerance=1e-5, name="before")
    monkeypatch.delitem(sys.modules, "elsewhere")
    dfa_hf.distribute_attention(after)
    file = elsewhere(after, theirs)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=f"did not reach {name}"):
            after(**batch)
        dfa_hf.distribute_attention(after)
    monkeypatch.setitem(sys.modules, "elsewhere", file)
    assert_close(dfa_hf.distribute_attention(after)(**batch).loss, want, tolerance=1e-5, name="distributed again")
    del after.forward
    liger = lambda model, _: monkeypatch.setitem(sys.modules, "elsewhere", elsewhere(model, theirs))  # noqa: E731
    monkeypatch.setattr("transformers.integrations.liger.apply_liger_kernel", liger)
    run = Trainer(trained, TrainingArguments(str(tmp_path), use_liger_kernel=True, use_cpu=True, report_to=[]))
    dfa_hf.distribute_trainer(run, size=1)
    assert run.model.forward.__module__ == "elsewhere"
    assert_close(run.model(**batch).loss, want, tolerance=1e-5, name="a Trainer's")
    for more in ({}, {"labels": None}):
        assert isinstance(after(**{**batch, **more}, return_dict=False), tuple)
        hooks.restore()
        with pytest.raises(UnsupportedError, match=f"did not reach {name}"):
            after(**{**batch, **more}, return_dict=False)
        dfa_hf.distribute_attention(after)


DISPATCHED = {
    "torch_chunk_gated_delta_rule": ("fla", "ops.gated_delta_rule.chunk_gated_delta_rule", "q k v"),
    "chunk_kimi_delta_attention": ("fla", "ops.kda.chunk_kda", "q k v"),
    "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d_fn", "x"),
    "mamba2_chunk_scan": ("mamba_ssm", "ops.triton.ssd_combined.mamba_chunk_scan_combined", "x"),
    "mamba_selective_scan": ("mamba_ssm", "ops.selective_scan_interface.selective_scan_fn", "u delta"),
}
"""Package, function and names of its first parameters, to which transformers hands a call over if it is installed."""


def as_module(function: Any) -> torch.nn.Module:
    """Return a function as the package `kernels` makes a module of it."""

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [own, *inspect.signature(function).parameters.values()]
    Func.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Func()


def install(home: dict[str, Any], name: str, *, kernels: bool) -> None:
    """Have a model's file call a package's function that computes the same, as if the package were installed."""
    decorator = pytest.importorskip("transformers.integrations.hub_kernels").use_kernel_func_from_hub_with_fallback
    package, path, names = DISPATCHED[name]
    real = getattr(home[name], OWN, home[name])
    if isinstance(real, torch.nn.Module):
        (real,) = inspect.getclosurevars(type(real).forward).nonlocals.values()
    real = inspect.unwrap(real)
    parameters = list(inspect.signature(real).parameters.values())
    parameters[: len(names.split())] = [x.replace(name=new) for x, new in zip(parameters, names.split(), strict=False)]
    signature = inspect.Signature(parameters)

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        return real(*bound.args, **bound.kwargs)

    function.__signature__, function.__module__ = signature, f"{package}.interface"  # type: ignore[attr-defined]
    module: Any = function
    for part in reversed(path.split(".")):
        module = SimpleNamespace(**{part: module})
    with patch.dict(sys.modules, {package: module}):
        made = decorator(path.rpartition(".")[2], package)(real)
    home[name] = as_module(made) if kernels and not isinstance(made, torch.nn.Module) else made


@over_ranks(3, timeout=170)
def test_functions_of_packages_that_name_arguments_otherwise_are_exact(rank: int, ranks: int) -> None:
    from tests.huggingface.sweep.tiny import build as build_type

    for number, kind in enumerate(("qwen3_next", "kimi_linear", "mamba2", "mamba") * 2):
        model = build_type(kind)
        home, reals = vars(sys.modules[type(model).__module__]), dict[str, Any]()
        for name in DISPATCHED.keys() & home.keys():
            install(home, name, kernels=number > 3)
            reals[name] = home[name]
        batch = text(1, 3 * ranks + number, seed=number)
        want = copy.deepcopy(model)
        with Float64():
            want(**batch, use_cache=False).loss.backward()
        distributed = dfa_hf.distribute_attention(model)
        with Float64():
            distributed(**batch).loss.backward()
        found = gradients_of(distributed, dist.group.WORLD)
        assert_gradients({name: x / ranks for name, x in found.items()}, gradients_of(want), kind)
        if number > 3:
            reals["causal_conv1d_fn"].forward = inspect.unwrap  # as `kernelize` replaces it
            with pytest.raises(UnsupportedError, match="kernels of the hub in a layer with a state"):
                distributed(**batch)
