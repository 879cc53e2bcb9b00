"""From a benchmark, or an engine's log, to a calibration profile."""
