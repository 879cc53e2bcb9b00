"""Traffic from a model that was learned: from a trace, or from ServeGen's fitted clients.

::

    a trace           -> learn        |          |  traffic      its requests
    ServeGen's files  -> servegen     |  model   |  source       its requests as a scenario's traffic
    TOML              -> model_file   |          |  model_file   TOML

:mod:`hbmtwin.workloads.learned.acceptance` says whether the requests are like the trace.
"""
