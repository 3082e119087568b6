"""`dfa-megatron prove`: a configuration, made small, on this machine's CPU: many ranks are compared with one."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from typing import Any

from dfa_megatron.errors import ProofError, UnsupportedError
from dfa_megatron.launch import expand

_FRAMEWORKS = {
    "megatron": ("dfa_megatron.megatron.small_script", "FLAGS of a Megatron script; FILE or @FILE has some of them"),
    "huggingface": ("dfa_megatron.huggingface.small.small_model", "TYPE or config.json of transformers, and --ranks"),
    "deepspeed": ("dfa_megatron.deepspeed.small_engine", "DeepSpeed's JSON with our block, and --model CONFIG"),
}
"""Each module has `small_job(words)`, which makes a `dfa_megatron.proving.small_job.SmallJob` of a command line."""

_EPILOG = """
  dfa-megatron prove megatron configs/megatron/qwen3-8b.args --context-parallel-size 4
  dfa-megatron prove huggingface qwen3 --ranks 4 --dfa-checkpoint remat
  dfa-megatron prove deepspeed configs/deepspeed/zero3.json --model config.json

The model is made small; parallel sizes, the ratio of heads, windows, layout and options stay. A cluster's job proves
itself: --dfa-prove, "prove": true, or prove(model). Exit status: 0 where the ranks compute what one rank computes, 1
where something differs, 2 for what cannot be proved.
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command to what `argparse.ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "prove",
        help="prove a training configuration, made small, on this machine's CPU",
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
    """Print what is smaller, and start the ranks; or be one of them."""
    kept = dict(os.environ)
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    os.environ |= {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    try:
        return _run(args)
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _run(args: argparse.Namespace) -> int:
    words = list(args.words)
    if args.framework == "megatron" and words and not words[0].startswith(("-", "@")):
        words[0] = "@" + words[0]
    try:
        with _quiet():
            job = importlib.import_module(_FRAMEWORKS[args.framework][0]).small_job(expand(words))
    except ImportError as error:
        raise UnsupportedError(f"prove {args.framework}", str(error), "an environment that has it") from error
    from dfa_megatron.doctor import start_ranks, world

    if "RANK" not in os.environ:
        print(job, flush=True)
        return start_ranks.start(["-m", "dfa_megatron.cli.main", *args.argv], job.ranks)
    here = world.join("cpu")
    status, out = 0, sys.stdout
    try:
        with _quiet():
            said = f"\n{job.prove()}"
    except ProofError as error:
        status, said = 1, f"\n{error}"
    except UnsupportedError as error:
        status, said, out = 2, f"dfa-megatron prove: {error}", sys.stderr
    if here.rank == 0:
        print(said, file=out, flush=True)
    here.leave()
    return status


@contextlib.contextmanager
def _quiet() -> Any:
    """Leave out what frameworks print, such as what they miss for GPUs; not the help of a parser, which exits."""
    before, out = logging.root.manager.disable, sys.stdout
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SystemExit:
        print(said.getvalue(), end="", file=out)
        raise
    finally:
        logging.disable(before)
