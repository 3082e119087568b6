"""Tries a folder that a run will write into, before any rank is started."""

from __future__ import annotations

import os
import tempfile

from gpt.errors import user_error_if_impossible


def writable(folder: str, flag: str) -> str:
    """Make `folder` and write a few bytes into it that are gone again afterwards.

    Raises:
        UserError: it cannot be made or written (no permission, a full disk, a file in its place); `flag` names another.
    """
    with user_error_if_impossible(f"write into {flag} {folder}"):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(4096))
            trial.flush()
            os.fsync(trial.fileno())
    return folder
