"""Attention kernels on real devices behind one contract. ``kernels_for`` of ``.backends`` gives those of a backend.

Importing the package loads no torch.
"""
