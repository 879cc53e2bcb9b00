"""Recorded runs of real servers: what their logs tell of the cost model, and how near a simulation comes."""
