"""What :mod:`hbmtwin.sim.engines` has, under its first name."""

from hbmtwin.sim.engines import GIB, EngineRules, Estimate, rules_for

__all__ = ["GIB", "EngineRules", "Estimate", "rules_for"]
