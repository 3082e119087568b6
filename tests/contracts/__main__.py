"""Say which contracts the sources of frameworks break: `python -m tests.contracts transformers=CLONE/src`.

Each argument is a package and the folder that holds it: a clone, or an unpacked wheel. Nothing of it is imported. The
exit status is 1 if a contract is broken.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.contracts.check import broken
from tests.contracts.sources import Sources
from tests.contracts.table import TABLE


def main() -> int:
    """Print the broken contracts; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.contracts", description=__doc__)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE=FOLDER")
    found = 0
    for package, _, folder in (each.partition("=") for each in parser.parse_args().packages):
        if package not in TABLE:
            parser.error(f"{package} is none of {', '.join(TABLE)}")
        said = broken(package, Sources([Path(folder)]))
        print(f"{package}: {len(said)} broken", *said, sep="\n  ")
        found += len(said)
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
