"""The command line: results on stdout, progress and errors on stderr.

::

    app             the verbs in the order of --help, and what becomes of an error
    options         options that several verbs have
    start           init, catalog
    simulate        run, compare
    operations      replay, validate allocator
    export          export
    exits, output   exit codes and messages; JSON and the console
    process         streams and signals, which are there before all else

The simulator, pandas and Plotly are imported inside the verbs that need them: together they cost most of a second,
which ``--help`` and shell completion should not pay. Nor is Typer imported here, which takes a fifth of one: whoever
interrupts it gets no traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.cli.process import interrupted

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; Ctrl-C is one word on stderr from the first import on."""
    try:
        from hbmtwin.cli import app

        return app.main(argv)
    except KeyboardInterrupt:
        return interrupted()
