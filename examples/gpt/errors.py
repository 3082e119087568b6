"""The one error of the example that is meant for its user: it is printed as a line, without a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """The request is impossible; the message names an alternative."""


@contextlib.contextmanager
def user_error_if_impossible(doing: str) -> Iterator[None]:
    """Turn an error of the operating system (a full disk, no permission, no such folder) into a UserError.

    Args:
        doing: the failed action, as "write runs/a/log.jsonl".

    Raises:
        UserError: in place of OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot {doing}: {error.strerror or error}") from error
