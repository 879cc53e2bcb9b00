"""The cost model and its calibration profile; attention kernels on real devices. Knows nobody."""
