"""Kernels timed on this machine, and the bytes that a device takes besides tensors."""
