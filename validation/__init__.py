"""Replay on the real thing and calibration: the twin's answers are compared here with real allocators and kernels."""
