"""The entry point of `dfa-megatron`: one module per sub-command; a user error is one line, not a traceback."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from dfa_megatron import __version__
from dfa_megatron.errors import DistAttentionError

_COMMANDS = {
    "plan": "dfa_megatron.cli.plan",
    "run": "dfa_megatron.cli.run_plan",
    "doctor": "dfa_megatron.cli.doctor",
}
"""Each module has `add_parser(subparsers)`, which sets `run`, a function of the parsed arguments, as a default."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every sub-command."""
    parser = argparse.ArgumentParser(prog="dfa-megatron", description="See schedules, check machines.")
    parser.add_argument("--version", action="version", version=f"dfa-megatron {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _COMMANDS.values():
        importlib.import_module(module).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return the exit status: 0, or 2 for a request that cannot be served."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] == ["prove"]:
        said = "a job proves itself: --dfa-prove in Megatron, prove=true in DeepSpeed's block, or prove(model)"
        print(f"dfa-megatron prove: {said}", file=sys.stderr)
        return 2
    args = build_parser().parse_args(given, argparse.Namespace(argv=given))
    try:
        return int(args.run(args) or 0)
    except (DistAttentionError, OSError) as error:
        print(f"dfa-megatron {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
