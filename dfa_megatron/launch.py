"""`python -m dfa_megatron.launch pretrain_gpt.py ARGS...` runs Megatron's unmodified script with the `--dfa-*` flags.

    torchrun --nproc-per-node 8 -m dfa_megatron.launch pretrain_gpt.py --dfa-checkpoint remat \\
        --spec dfa_megatron.megatron get_spec --context-parallel-size 8 ...

`@FILE` among the arguments stands for the flags of an argument file, such as those of configs/megatron: one a line,
with # comments, and with several values on the line of their flag.

Before the script runs one name of Megatron's is replaced in this process, and nothing on disk: see
dfa_megatron/megatron/script/dfa_flags.py. The spec replaces others.
"""

from __future__ import annotations

import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from dfa_megatron.errors import DistAttentionError, UnsupportedError

USAGE = "usage: python -m dfa_megatron.launch SCRIPT.py ARGS...   (torchrun -m dfa_megatron.launch SCRIPT.py ARGS...)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script as `python SCRIPT ARGS...` would, after Megatron has been told about our flags.

    Args:
        argv: the script and its arguments; the command line's where None.

    Returns:
        The exit status: 2, with one line on stderr, for an unsupported request. The script's own errors pass through.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0].startswith("-"):
        print(f"{USAGE}\n{__doc__ or ''}", file=sys.stdout if given[:1] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if given[:1] in (["-h"], ["--help"]) else 2
    script = Path(given[0])
    if not script.is_file():
        print(f"dfa_megatron.launch: there is no script {given[0]}; {USAGE}", file=sys.stderr)
        return 2
    # As for `python SCRIPT`; a Megatron clone beside the script also overrides an installed megatron-core.
    sys.path.insert(0, str(script.resolve().parent))
    try:
        given[1:] = expand(given[1:])
        from dfa_megatron.megatron.script.dfa_flags import prepare

        prepare(given[1:])
    except (DistAttentionError, ImportError, OSError) as error:
        if isinstance(error, ImportError):  # of Megatron's, or of a package that it needs: where is the question
            traceback.print_exc()
        print(f"dfa_megatron.launch: {error}", file=sys.stderr)
        return 2
    sys.argv = given
    runpy.run_path(given[0], run_name="__main__")
    return 0


def read_arguments(path: Path) -> list[str]:
    """Return the words of an argument file, split as a shell would split them.

    Raises:
        OSError: the file cannot be read.
        UnsupportedError: a line does not begin with a flag, or a quote is not closed.
    """
    words: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found = shlex.split(line, comments=True)
        except ValueError as error:
            raise UnsupportedError(f"{path}:{number}: {line.strip()}", str(error), "quotes in pairs") from error
        if found and not found[0].startswith("--"):
            raise UnsupportedError(
                f"{path}:{number}: {line.strip()}", "a line begins with a flag", "--flag value, or # and a comment"
            )
        words += found
    return words


def expand(arguments: Sequence[str]) -> list[str]:
    """Replace each `@FILE` by its words, so that later flags override it.

    Raises:
        OSError, UnsupportedError: as `read_arguments`.
    """
    words: list[str] = []
    for argument in arguments:
        words += read_arguments(Path(argument[1:])) if argument.startswith("@") else [argument]
    return words


if __name__ == "__main__":
    sys.exit(main())
