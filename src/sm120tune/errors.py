"""The one exception that is shown to a person as a line of text."""

from __future__ import annotations


class UserError(Exception):
    """Bad arguments or environment: shown as one line, exit code 2, nothing written.

    The message names the offending value and says what to do about it.
    """
