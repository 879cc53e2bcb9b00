"""The command line: results on stdout, progress and errors on stderr.

::

    app             the verbs in the order of --help, and what becomes of an error
    options         options that several verbs have
    start           init, catalog
    simulate        run, compare
    operations      replay, validate allocator
    export          export
    exits, output   exit codes and messages; JSON and the console

The simulator, pandas and Plotly are imported inside the verbs that need them: together they cost most of a second,
which ``--help`` and shell completion should not pay.
"""

from hbmtwin.cli.app import main

__all__ = ["main"]
