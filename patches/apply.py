"""Puts one of the patches beside this file into a clone of Megatron-LM or DeepSpeed, takes it out again, or only looks.

    python patches/apply.py megatron-lm ~/Megatron-LM            put in the patch that fits; twice changes nothing more
    python patches/apply.py megatron-lm ~/Megatron-LM --check    say whether one fits or is in; nothing is written
    python patches/apply.py megatron-lm ~/Megatron-LM --reverse  take it out

The first argument names a folder beside this file, which holds one unified diff per release, named after its tag.
A hunk fits where its lines are found unchanged, at the place it names or else at the only place they are at. A patch
goes in whole or not at all. Exit status: 0 done, or nothing to do; 1 nothing fits; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PATCHES = Path(__file__).resolve().parent
_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch does not fit, or cannot be read; the message is for the user."""


@dataclass(frozen=True)
class Hunk:
    """Lines of one place in one file, each with its line end."""

    path: str
    number: int
    """From 1, over the whole patch."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    line_before: int
    """Where `before` starts in the file that the patch was made from, from 1; `line_after` is the same for `after`."""
    line_after: int

    def reversed(self) -> Hunk:
        """The hunk that takes this one back."""
        return Hunk(self.path, self.number, self.after, self.before, self.line_after, self.line_before)

    @property
    def name(self) -> str:
        """For messages."""
        return f"hunk {self.number} ({self.path}, near line {self.line_before})"


def read_patch(path: Path) -> list[Hunk]:
    """The hunks of a unified diff that changes files and neither adds, removes nor renames any.

    Raises:
        PatchError: anything else, or a path that leads out of the clone.
    """
    hunks: list[Hunk] = []
    target = ""
    lines = _lines(path.read_bytes())
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("+++ "):
            target = _target(line, path)
        elif header := _HEADER.match(line):
            sizes = (int(header[2] or 1), int(header[4] or 1))
            rows = _rows(lines[at + 1 :], sizes)
            before, after = (tuple(row[1:] for row in rows if row[0] in kinds) for kinds in (" -", " +"))
            if (len(before), len(after)) != sizes or not before or not after:
                raise PatchError(
                    f"{path.name}, line {at + 1}: this hunk has not the lines that it announces, or none on a side"
                )
            hunks.append(Hunk(target, len(hunks) + 1, before, after, int(header[1]), int(header[3])))
            at += len(rows)
        at += 1
    if not hunks or not all(hunk.path for hunk in hunks):
        raise PatchError(f"{path.name} is not a unified diff")
    return hunks


def _lines(content: bytes) -> list[str]:
    """Lines with their ends, as diff counts them: only a newline ends one."""
    return re.findall(r"[^\n]*\n|[^\n]+", content.decode("utf-8"))


def _target(line: str, path: Path) -> str:
    name = line[4:].split("\t")[0].strip()
    target = PurePosixPath(name.removeprefix("b/"))
    if name == "/dev/null" or target.is_absolute() or ".." in target.parts:
        raise PatchError(f"{path.name}: only changes of files inside the clone are handled, not {name}")
    return str(target)


def _rows(lines: Sequence[str], sizes: tuple[int, int]) -> list[str]:
    """The rows of a hunk; an empty row is one of context whose blank an editor has taken away."""
    rows: list[str] = []
    left = list(sizes)
    for line in lines:
        row = " \n" if line == "\n" else line
        if left == [0, 0] or row[0] not in " +-":
            break
        left[0] -= row[0] in " -"
        left[1] -= row[0] in " +"
        rows.append(row)
    return rows


def locate(lines: Sequence[str], wanted: Sequence[str], line: int) -> int | None:
    """Where the wanted lines start (from 0): at the line that is named (from 1), or else at their only place."""
    size = len(wanted)
    if tuple(lines[line - 1 : line - 1 + size]) == tuple(wanted):
        return line - 1
    places = [at for at in range(len(lines) - size + 1) if tuple(lines[at : at + size]) == tuple(wanted)]
    return places[0] if len(places) == 1 else None


class Tree:
    """The files of a clone that a patch touches, changed in memory first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[str, list[str]] = {}

    def lines(self, path: str) -> list[str]:
        """A file's lines; none for a file that is not there."""
        if path not in self.files:
            file = self.root / path
            self.files[path] = _lines(file.read_bytes()) if file.is_file() else []
        return self.files[path]

    def change(self, hunk: Hunk) -> bool:
        """Replace the hunk's lines in memory; False where they are not found."""
        lines = self.lines(hunk.path)
        at = locate(lines, hunk.before, hunk.line_before)
        if at is None:
            return False
        lines[at : at + len(hunk.before)] = hunk.after
        return True

    def write(self) -> None:
        """Write what has changed: first all of it beside the files, then in their place."""
        staged: list[tuple[Path, Path]] = []
        try:
            for path, lines in self.files.items():
                file = self.root / path
                beside = file.with_name(f"{file.name}.dfa-patch")
                staged.append((beside, file))
                beside.write_bytes("".join(lines).encode("utf-8"))
                shutil.copymode(file, beside)
            for beside, file in staged:
                os.replace(beside, file)
        finally:
            for beside, _ in staged:
                beside.unlink(missing_ok=True)


def try_patch(root: Path, hunks: Sequence[Hunk]) -> tuple[Tree, int]:
    """The tree with the patch in it, in memory, and how many hunks fitted before the first that did not."""
    tree = Tree(root)
    for count, hunk in enumerate(hunks):
        if not tree.change(hunk):
            return tree, count
    return tree, len(hunks)


@dataclass(frozen=True)
class Finding:
    """How one patch stands to a clone."""

    patch: Path
    hunks: list[Hunk]
    fits: int
    """Hunks that fit, up to the first that does not."""
    is_in: int
    """Hunks that are in already, up to the first that is not."""

    @property
    def state(self) -> str:
        """'in', 'fits' or 'neither'."""
        return "in" if self.is_in == len(self.hunks) else "fits" if self.fits == len(self.hunks) else "neither"

    def why_not(self) -> str:
        """The first hunk that does not fit, with the lines that it looks for."""
        hunk = self.hunks[self.fits]
        if self.is_in > self.fits:
            rest = self.hunks[self.is_in]
            return f"{self.patch.name}: {hunk.name} is in already, while {rest.name} is not"
        looked_for = "".join(f"    {line}" for line in hunk.before)
        return f"{self.patch.name}: {hunk.name} does not fit. It looks for\n{looked_for}"


def examine(root: Path, patch: Path) -> Finding:
    """How a patch stands to a clone."""
    hunks = read_patch(patch)
    _, fits = try_patch(root, hunks)
    _, is_in = try_patch(root, [hunk.reversed() for hunk in hunks])
    return Finding(patch, hunks, fits, is_in)


def choose(root: Path, product: str) -> Finding:
    """The patch of a product that is in or fits; of several the one whose place names are right.

    Raises:
        PatchError: none does; shows the first hunk that does not fit of the patch that comes nearest.
    """
    patches = sorted((PATCHES / product).glob("*.patch"))
    findings = [examine(root, patch) for patch in patches]
    good = [finding for finding in findings if finding.state != "neither"]
    if good:
        return max(good, key=lambda finding: _at_their_lines(root, finding))
    nearest = max(findings, key=lambda finding: max(finding.fits, finding.is_in))
    names = ", ".join(patch.stem for patch in patches)
    raise PatchError(f"no patch of {product} fits {root} (there are some for {names}). Nearest is {nearest.why_not()}")


def _at_their_lines(root: Path, finding: Finding) -> int:
    """How many hunks are at the very lines that they name: several releases may differ by that alone."""
    tree = Tree(root)
    count = 0
    for hunk in finding.hunks:
        wanted, line = (hunk.after, hunk.line_after) if finding.state == "in" else (hunk.before, hunk.line_before)
        count += tuple(tree.lines(hunk.path)[line - 1 : line - 1 + len(wanted)]) == wanted
    return count


def run(product: str, root: Path, *, check: bool = False, reverse: bool = False) -> str:
    """Do what was asked; returns the line to tell the user.

    Raises:
        PatchError: no patch fits; nothing was written.
    """
    finding = choose(root, product)
    what = f"{finding.patch.parent.name}/{finding.patch.name}"
    if check:
        return f"{what} {'is in' if finding.state == 'in' else 'fits'} {root}"
    if (finding.state == "in") != reverse:
        return f"{what} is {'already' if finding.state == 'in' else 'not'} in {root}: nothing to do"
    tree, _ = try_patch(root, [hunk.reversed() for hunk in finding.hunks] if reverse else finding.hunks)
    tree.write()
    return f"{what} {'taken out of' if reverse else 'put into'} {root}: {len(tree.files)} files"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    products = sorted(folder.name for folder in PATCHES.iterdir() if any(folder.glob("*.patch")))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("product", choices=products)
    parser.add_argument("clone", type=Path, help="the folder that holds the clone")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="write nothing")
    action.add_argument("--reverse", action="store_true", help="take the patch out")
    args = parser.parse_args(argv)
    if not args.clone.is_dir():
        parser.error(f"there is no folder {args.clone}")
    try:
        print(run(args.product, args.clone, check=args.check, reverse=args.reverse))
    except (PatchError, OSError, UnicodeDecodeError) as error:
        print(f"apply.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
