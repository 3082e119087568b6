"""containers/packages.py keeps an image's packages, and says which one changed or is too old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "containers" / "packages.py"
LOCK = """# comment
first==2.0 \\
    --hash=sha256:aa
second==1.0 ; python_version >= "3" \\
    --hash=sha256:bb
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of packages: ours needs first>=2 and, with an extra, absent; first is NVIDIA's build of 2.1."""
    for name, version, needs in (
        ("ours", "1.0", ["first>=2", 'absent>=1; extra == "more"', 'never; python_version < "3"']),
        ("First", "2.1a0+nv26", ["gone>=1"]),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {need}" for need in needs]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(image: Path, *args: str, replace: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(image), "REPLACE": replace}
    command = [sys.executable, str(SCRIPT), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_what_the_image_has_is_left_out_of_the_lock_with_its_hashes(image: Path) -> None:
    lock = image / "lock.txt"
    lock.write_text(LOCK)
    done = run(image, "missing", str(lock))
    assert done.stdout == 'second==1.0 ; python_version >= "3" \\\n    --hash=sha256:bb\n'
    assert "first==2.0" in run(image, "missing", str(lock), replace="first").stdout


@pytest.mark.parametrize(
    ("before", "root", "replace", "says"),
    [
        ("First==2.1a0+nv26\n", "ours", "", ""),
        ("First==2.1a0+nv26\n", "ours[more]", "", "ours needs absent>=1, and here is None"),
        ("First==2.0\n", "ours", "", "first 2.0 of the image would become 2.1a0+nv26"),
        # first came with ours: what it needs is ours to bring
        ("", "ours", "", "first needs gone>=1, and here is None"),
        ("First==2.0\n", "ours", "first", "first needs gone>=1, and here is None"),
        ("lost==1.0\nFirst==2.1a0+nv26\n", "ours", "", "lost 1.0 of the image would become None"),
    ],
)
def test_a_change_or_a_requirement_that_is_not_met_fails_the_build(
    image: Path, before: str, root: str, replace: str, says: str
) -> None:
    (image / "before.txt").write_text(before)
    done = run(image, "check", str(image / "before.txt"), root, replace=replace)
    assert done.returncode == bool(says), done.stderr
    assert says in done.stderr
    assert ("would become" in done.stderr) == ("would become" in says)
