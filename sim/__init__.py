"""Scenario, catalog, memory budget, schedulers, engine, results: the twin itself. Knows the three ground folders."""
