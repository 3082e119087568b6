"""`dfa-megatron selfcheck`: a user's own configuration, made small, on many ranks and on one, compared."""

from __future__ import annotations

import argparse
import importlib
import warnings
from pathlib import Path

from dfa_megatron.argument_file import expand
from dfa_megatron.errors import UnsupportedError

_FRAMEWORKS = {
    "attention": ("dfa_megatron.cli.attention_check", "the functions alone, with shapes and options; --help has them"),
    "megatron": (
        "dfa_megatron.megatron.selfcheck.shrink",
        "the flags of a Megatron script; @FILE or FILE has some of them",
    ),
    "huggingface": ("dfa_megatron.huggingface.selfcheck.command", "a config.json of transformers, and --ranks"),
    "deepspeed": ("dfa_megatron.deepspeed.selfcheck.command", "DeepSpeed's JSON with our block, and --model CONFIG"),
}
"""Each module has `case_of(words)`, which makes a `dfa_megatron.selfcheck.case.Case` of the words of a command line."""

_EPILOG = """
  dfa-megatron selfcheck megatron configs/megatron/qwen3-8b.args
  dfa-megatron selfcheck megatron @train.args --context-parallel-size 4
  dfa-megatron selfcheck attention --ranks 5 --heads 6 --kv-heads 2 --window-size 40 0 --schedule balanced
  dfa-megatron selfcheck huggingface config.json --ranks 8 --dfa-checkpoint remat
  dfa-megatron selfcheck deepspeed configs/deepspeed/zero3.json --model config.json

The model is made small; the context-parallel size, the ratio of heads, window, layout and options stay. Exit status: 0
where all that the ranks compute is as on one rank, 1 where something differs, 2 for what cannot be checked.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `selfcheck`."""
    parser = subparsers.add_parser(
        "selfcheck",
        help="prove a training configuration on this machine's CPU",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="framework", metavar="FRAMEWORK", required=True)
    for name, (_, help_text) in _FRAMEWORKS.items():
        # Flags are the framework's, -h as well as --help excepted.
        kinds.add_parser(name, help=help_text, add_help=False, prefix_chars="\0").add_argument("words", nargs="*")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, and print the table."""
    words = list(args.words)
    has_parser = args.framework != "megatron"  # then its flags are ours, with their own help and defaults
    if words[:1] in ([], ["-h"], ["--help"]) and not has_parser:
        print(_EPILOG)
        return 0 if words else 2
    if not has_parser and not words[0].startswith(("-", "@")) and Path(words[0]).suffix != ".json":
        words[0] = "@" + words[0]
    try:
        from dfa_megatron.selfcheck.run_case import check
        from dfa_megatron.selfcheck.table import text

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # frameworks say what they miss for GPUs
            case = importlib.import_module(_FRAMEWORKS[args.framework][0]).case_of(expand(words))
    except ImportError as error:
        raise UnsupportedError(f"selfcheck {args.framework}", str(error), "an environment that has it") from error
    report = check(case)
    print(text(report))
    return report.status
