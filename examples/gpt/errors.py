"""The one error of the example that is meant for its user: it is printed as a line, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """What was asked cannot be done; the message says what would work."""


USER_ERROR_STATUS = 2
"""The exit status of a run that ended with a UserError, as argparse has it."""
