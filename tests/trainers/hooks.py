"""Check that trainers still call the hooks that docs/trainers.md names, in their source.

    python -m tests.trainers.hooks                       # the pinned commits, from GitHub
    python -m tests.trainers.hooks --commit main         # what is there now
    python -m tests.trainers.hooks --from FOLDER         # files FOLDER/owner/name/path, without a network

Nothing of theirs is imported or run. CI does not run this: it needs GitHub.
"""

from __future__ import annotations

import argparse
import ast
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Hook:
    """A call that a trainer makes, with what it passes."""

    repository: str
    commit: str
    path: str
    function: str
    """The name or attribute that is called."""
    arguments: tuple[str, ...]
    """Source of the positional arguments, then of keywords as `name=value`."""
    why: str


BRIDGE = ("NVIDIA-NeMo/Megatron-Bridge", "067f987df03b8355b03192d88d70f1709fedf51a")
SLIME = ("THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515")
VERL = ("volcengine/verl", "b178a3cd56f58b2d502255daba591e92833930a7")
HOOKS = (
    Hook(
        *BRIDGE,
        "src/megatron/bridge/models/gpt_provider.py",
        "transformer_layer_spec",
        ("self", "vp_stage=vp_stage"),
        "a provider's transformer_layer_spec may be a function of the provider and the stage",
    ),
    Hook(
        *SLIME,
        "slime/backends/megatron_utils/model_provider.py",
        "transformer_layer_spec",
        ("args", "config", "vp_stage"),
        "--spec may name a function of the arguments, the config and the stage",
    ),
    Hook(
        *VERL,
        "verl/workers/engine/megatron/transformer_impl.py",
        "to_megatron_provider",
        ("load_weights=False",),
        "the engine takes its model from a provider of Megatron-Bridge",
    ),
)


def text_of(hook: Hook, commit: str | None, folder: Path | None) -> str:
    """Return the source of the file that has the hook."""
    if folder is not None:
        return (folder / hook.repository / hook.path).read_text(encoding="utf-8")
    address = f"https://raw.githubusercontent.com/{hook.repository}/{commit or hook.commit}/{hook.path}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


def is_called(hook: Hook, text: str) -> bool:
    """Return whether the source has the call."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            given = [ast.unparse(argument) for argument in node.args]
            given += [f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords]
            if name == hook.function and tuple(given) == hook.arguments:
                return True
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each hook; return 1 if one is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="of every repository, in place of the pinned ones")
    parser.add_argument("--from", dest="folder", type=Path, help="read files below this folder")
    args = parser.parse_args(argv)
    missing = 0
    for hook in HOOKS:
        there = is_called(hook, text_of(hook, args.commit, args.folder))
        missing += not there
        call = f"{hook.function}({', '.join(hook.arguments)})"
        print(f"{'ok' if there else 'GONE':4} {hook.repository} {hook.path}: {call}; {hook.why}")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
