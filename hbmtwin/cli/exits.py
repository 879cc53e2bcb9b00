"""How a verb ends: exit codes, and errors that are told in a line instead of a traceback.

Exit codes: 0 done (an out-of-memory death is a result), 1 failure (traffic or files that cannot be read or written,
something to compare with that is not there), 2 usage (a key, value or combination that makes no sense), 3 does not fit,
or died with ``--fail-on-oom``, or served too few as promised with ``--fail-on-slo``, or came to a standstill (a
live-lock or a deadlock of its scheduler), or differs from the real one, 130 interrupted (Ctrl-C), 143 terminated
(SIGTERM).
"""

from __future__ import annotations

import typer

OK, FAILURE, USAGE, DOES_NOT_FIT = 0, 1, 2, 3
DIFFERS = 3


class UsageError(typer.TyperException):
    """An argument that makes no sense, told as the other errors are."""

    exit_code = USAGE


def exit_code_of(error: Exception) -> int | None:
    """The exit code of a known failure; None for a bug, whose traceback is wanted."""
    from hbmtwin.api import (
        CatalogError,
        DoesNotFit,
        ReplayError,
        ResultError,
        ScenarioError,
        UnknownPolicy,
        WorkersLost,
        WorkloadError,
    )

    if isinstance(error, DoesNotFit):
        return DOES_NOT_FIT
    if isinstance(error, ScenarioError | CatalogError | UnknownPolicy | ReplayError):
        return USAGE
    if isinstance(error, WorkloadError | ResultError | WorkersLost | OSError):
        return FAILURE
    return None


def subtraction(error: Exception) -> str:
    """Where every byte of a device goes on which a model does not fit, line by line; empty for other errors."""
    from hbmtwin.api import DoesNotFit

    if not isinstance(error, DoesNotFit):
        return ""
    if error.budget.stages:
        from hbmtwin.cli.tables import stage_columns

        return stage_columns(error.budget)
    rows = [(line.item, line.bytes, line.low, line.high, line.profile) for line in error.budget.lines]
    total = error.budget.total_bytes
    text = ""
    for item, size, low, high, profile in [*rows, ("sum: the device", total, total, total, "")]:
        text += f"\n  {item:<16}{size / 2**30:>9.2f} GiB"
        if low != high:
            text += f"   {'partly measured' if profile else 'estimated'}, {low / 2**30:.2f} to {high / 2**30:.2f}"
        elif profile:
            text += "   measured"
        text += f", profile {profile}" * bool(profile)
    return text
