"""Scenario, catalog, memory budget, scheduler, engine, results: the twin itself. Knows the three ground folders."""
