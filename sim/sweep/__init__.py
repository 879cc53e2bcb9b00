"""Many runs that belong together: each a scenario with a key, each one row, stored as soon as it is there.

::

    run_row        a scenario -> one flat row
    scenario_key   a scenario -> the name of its run
    store          rows in a directory, one file a run
    execute        rows of many scenarios, in processes here or on a Ray cluster
"""
