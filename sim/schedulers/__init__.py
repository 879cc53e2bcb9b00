"""The scheduling policies, one a file; their contract is :mod:`hbmtwin.sim.scheduler`."""
