"""Find the packages of a lock that an image lacks, and check the packages of the built image; for the Dockerfiles.

    packages.py missing LOCK               print the lock's entries for packages that the image does not have
    packages.py check BEFORE NAME[EXTRA]   compare with BEFORE (pip list --format=freeze), and with NAME's needs

The variable REPLACE lists packages of the image, separated by spaces, that the lock may replace.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def installed(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing(lock: str, replace: set[str]) -> Iterator[str]:
    """Yield the lock's entries, with their hashes, for packages that are not installed or may be replaced."""
    for entry in re.split(r"\n(?=\S)", lock.strip()):
        if not entry.startswith("#"):
            name = canonicalize_name(re.split(r"[=\s]", entry, maxsplit=1)[0])
            if installed(name) is None or name in replace:
                yield entry


def changed(before: dict[str, str], replace: set[str]) -> Iterator[str]:
    """Yield the packages that changed their version or went, and that must not be replaced."""
    for name, version in before.items():
        if name not in replace and (now := installed(name)) != version:
            yield f"{name} {version} of the image would become {now}"


def unmet(root: str, trusted: set[str]) -> Iterator[str]:
    """Yield the missing requirements of `root` and of its requirements; `trusted` packages are not checked."""
    todo, seen = [Requirement(root)], set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in trusted or (name, *sorted(wanted.extras)) in seen:
            continue
        seen.add((name, *sorted(wanted.extras)))
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in wanted.extras or {""}):
                continue
            version = installed(needed.name)
            if version is None or not needed.specifier.contains(version, prereleases=True):
                yield f"{name} needs {needed.name}{needed.specifier}, and here is {version}"
            else:
                todo.append(needed)


def frozen(text: str) -> dict[str, str]:
    """Return the versions by name in the output of `pip list --format=freeze`."""
    pairs = (line.split("==", 1) for line in text.splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, version in pairs}


def main(command: str, path: str, *root: str) -> int:
    """Run a command and return the exit status."""
    text = Path(path).read_text(encoding="utf-8")
    replace = {canonicalize_name(name) for name in os.environ.get("REPLACE", "").split()}
    if command == "missing":
        print(*missing(text, replace), sep="\n")
        return 0
    before = frozen(text)
    wrong = [*changed(before, replace), *unmet(root[0], set(before) - replace)]
    if wrong:
        print(*wrong, "A package of the image that is too old: build with REPLACE=its-name", sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
