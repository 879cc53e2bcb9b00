"""A finished run replayed on the real allocator and with real kernels, and what differs."""
