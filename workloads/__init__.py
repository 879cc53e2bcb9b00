"""Requests, arrivals, lengths, sessions and traces: what traffic the memory has to bear. Knows nobody."""
