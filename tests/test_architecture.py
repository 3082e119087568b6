"""The import directions: the table that docs/architecture.md draws, compared with what every module really imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dfa_megatron

PACKAGE = Path(dfa_megatron.__file__).parent

GROUND = {"config", "errors", "flags", "names"}
"""Importable by all; they import the standard library only."""

ROOMS = {"plan", "runtime", "kernels"}
"""Parts whose folders are rooms with a row of their own."""

LANGUAGE = {"plan.language"}
PLAN = {"plan", "plan.language", "plan.schedules", "plan.lowering", "plan.proof", "plan.cost"}
KERNELS = PLAN | {"kernels", "kernels.adapters", "kernels.triton"}
RUNTIME = KERNELS | {"runtime", "runtime.agreement", "runtime.comm", "runtime.execute"}
FUNCTIONS = RUNTIME | {
    *("remat", "attention", "sharding", "recurrence", "loss", "trees", "sequence", "indexed", "whole_batch"),
}
FRAMEWORKS = {"megatron", "huggingface", "deepspeed"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "flags": set(),
    "config": {"flags", "names"},
    "names": set(),
    # A plan: the language, then what writes plans, lowers, proves and prices them. The loop is `plan.interpret`.
    "plan.language": set(),
    "plan.schedules": LANGUAGE,
    "plan.lowering": LANGUAGE,
    "plan.proof": LANGUAGE | {"plan", "plan.lowering"},
    "plan.cost": LANGUAGE | {"plan", "plan.schedules", "plan.lowering"},
    "plan": PLAN,
    "batches": LANGUAGE | {"plan.cost"},
    "masks": LANGUAGE | {"plan.lowering"},
    "layouts": LANGUAGE | {"plan.schedules"},
    "naive": LANGUAGE,
    "kernels": PLAN | {"kernels.adapters", "kernels.triton"},
    "kernels.adapters": LANGUAGE | {"kernels"},
    "kernels.triton": LANGUAGE | {"kernels", "kernels.adapters"},
    "runtime.agreement": {"kernels", "runtime"},
    "runtime.comm": {"kernels", "runtime", "runtime.agreement"},
    "runtime.execute": KERNELS | {"runtime", "runtime.comm"},
    "runtime": RUNTIME,
    "remat": RUNTIME,
    "rows": RUNTIME,
    "whole_batch": RUNTIME,
    "attention": RUNTIME | {"rows"},
    "sharding": RUNTIME | {"rows"},
    "recurrence": RUNTIME | {"remat", "sharding", "rows"},
    "sequence": RUNTIME | {"sharding", "rows"},
    "indexed": RUNTIME | {"remat", "rows"},
    "loss": RUNTIME | {"sharding"},
    "trees": RUNTIME | {"sharding", "loss"},
    "hooks": set(),
    "proving": set(),
    "megatron": FUNCTIONS | {"proving", "hooks"},
    "huggingface": FUNCTIONS | {"proving", "hooks"},
    "deepspeed": FUNCTIONS | {"proving", "hooks", "huggingface"},
    "launch": {"megatron"},
    "doctor": FUNCTIONS,
    "cli": FUNCTIONS | FRAMEWORKS | {"doctor", "launch"},
}
"""What each part may import of this package, beside itself, the ground and the package's own lazy names."""

OUTSIDE: dict[str, set[str]] = {
    **{part: {"torch"} for part in ("naive", "rows", "proving", "doctor", *(FUNCTIONS - PLAN))},
    "kernels": {"torch", "triton"},
    "kernels.adapters": {"torch", "flash_attn", "flash_attn_interface", "cutlass"},
    "kernels.triton": {"torch", "triton"},
    "megatron": {"torch", "megatron", "packaging", "transformer_engine"},
    "huggingface": {"torch", "transformers", "accelerate"},
    "deepspeed": {"torch", "deepspeed", "transformers", "accelerate"},
}
"""Packages outside the standard library that each part may import."""

LAZY_ONLY = {"cli": {"torch"}, "masks": {"torch"}}
"""Packages that a part may import inside functions only, where they are not in its row above."""


def part_of(module: str) -> str:
    """`dfa_megatron.plan.language.ir` belongs to `plan.language`, `dfa_megatron.plan.interpret` to `plan`."""
    _, part, room, *_ = (*module.split("."), "", "")
    return f"{part}.{room}" if part in ROOMS and (PACKAGE / part / room / "__init__.py").is_file() and room else part


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path, module: str) -> Iterator[tuple[str, bool, int]]:
    """Every imported module with whether it is imported when the file is, and its line; typing-only imports count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside_functions = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        at_top = id(node) not in inside_functions
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at_top, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import hides its direction"
            base = node.module or ""
            if base == "dfa_megatron":  # a part (`import plan`) or a public name (`import draw`)
                yield from ((f"dfa_megatron.{alias.name}", at_top, node.lineno) for alias in node.names)
            else:
                yield base, at_top, node.lineno


def wrong_imports(module: str, path: Path) -> list[str]:
    part = part_of(module)
    found = []
    for target, at_top, line in imports(path, module):
        root = target.split(".")[0]
        if root == "dfa_megatron":
            other = part_of(target)
            allowed = {part, ""} | GROUND | MAY_IMPORT.get(part, set())
            if part in GROUND:
                allowed = {part} | ({"errors", "flags", "names"} if part == "config" else set())
            is_public_name = other in dfa_megatron.__all__
            if not is_public_name and other not in allowed:
                found.append(f"{module}:{line} imports {target}: {part or 'the package'} may not use {other}")
        elif root not in sys.stdlib_module_names:
            allowed = OUTSIDE.get(part, set()) | (LAZY_ONLY.get(part, set()) if not at_top else set())
            if root not in allowed:
                found.append(f"{module}:{line} imports {root}, which {part or 'the package'} may not use")
    return found


@pytest.mark.parametrize(("module", "path"), [*modules()], ids=[name for name, _ in modules()])
def test_a_module_imports_only_what_its_part_may(module: str, path: Path) -> None:
    if module == "dfa_megatron":
        pytest.skip("the package itself names the homes of its lazy names; the tests below look at it")
    assert part_of(module) in MAY_IMPORT, f"{module} has no row in the table"
    assert wrong_imports(module, path) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("dfa_megatron.plan.language.ir", "import torch"),
        ("dfa_megatron.plan.language.ir", "from dfa_megatron.plan.cost.hardware import Link"),
        ("dfa_megatron.plan.language.ir", "from dfa_megatron.runtime.counters import COUNTERS"),
        ("dfa_megatron.runtime.execute.memory", "from dfa_megatron.attention import dist_flash_attn_func"),
        ("dfa_megatron.runtime.execute.memory", "from dfa_megatron.doctor import dense"),
        ("dfa_megatron.attention", "def f():\n    import megatron.core"),
        ("dfa_megatron.config", "from dfa_megatron.plan.language.geometry import Span"),
        ("dfa_megatron.errors", "from dfa_megatron.config import DistAttentionConfig"),
        ("dfa_megatron.cli.plan", "import torch"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(line + "\n")
    assert len(wrong_imports(module, path)) == 1


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_planning_leaves_torch_unloaded() -> None:
    names = [name for name, _ in modules() if part_of(name).split(".")[0] == "plan" or part_of(name) in GROUND]
    listed = ", ".join(names)
    command = "from dfa_megatron.cli.main import main; main(['plan', '--ranks', '2', '--seq-length', '64'])"
    said = run(f"import sys, {listed}; {command}; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert said.splitlines()[-1] == "False False"


def test_the_package_imports_without_megatron_and_deepspeed() -> None:
    blocked = "megatron", "deepspeed", "transformers", "triton", "transformer_engine", "matplotlib"
    code = f"""
import sys
for name in {blocked}:
    sys.modules[name] = None  # any import of it now raises ImportError
import dfa_megatron
print('torch' in sys.modules)
for name in dfa_megatron.__all__:
    getattr(dfa_megatron, name)
"""
    assert run(code) == "False"


def test_nothing_that_came_from_another_rank_is_unpickled() -> None:
    """TRL's own gather_object apart, which brings texts to its vLLM client."""
    found = re.compile(r"\bdist\.\w*_object|\bpickle\.loads?\(|torch\.load\((?!.*weights_only=True)")
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {path.name: found.findall(text) for path, text in texts.items() if found.search(text)} == {}
