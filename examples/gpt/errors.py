"""The one error of the example that is meant for its user: it is printed as a line, without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """What was asked cannot be done; the message says what would work."""


@contextlib.contextmanager
def user_error_if_impossible(doing: str) -> Iterator[None]:
    """Turn an error of the operating system (a full disk, no permission, no such folder) into a UserError.

    Args:
        doing: what could not be done then, as "write runs/a/log.jsonl".

    Raises:
        UserError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {doing}: {error.strerror or error}") from error
