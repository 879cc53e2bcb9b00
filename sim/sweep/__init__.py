"""Many runs that belong together: each a scenario with a key, each one row, stored as soon as it is there.

::

    run_row        a scenario -> one flat row
    scenario_key   a scenario -> the name of its run
    store          rows in a directory, one file a run
    workers        a pool of processes here; ray_cluster: one of actors there
    execute        rows of many scenarios, each stored as soon as it is there
"""
