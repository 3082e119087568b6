"""Check before the start of the ranks that a run can write into a folder."""

from __future__ import annotations

import os
import tempfile

from gpt.errors import user_error_if_impossible


def writable(folder: str, flag: str) -> str:
    """Make `folder`, write a few bytes into it and remove them.

    Raises:
        UserError: no permission, a full disk, or a file in its place; the message names `flag`.
    """
    with user_error_if_impossible(f"write into {flag} {folder}"):
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as trial:
            trial.write(bytes(4096))
            trial.flush()
            os.fsync(trial.fileno())
    return folder
