"""What traffic looks like, in one pass over its requests: arrivals, lengths, sessions, and how much prompts share.

::

    requests -> describe -> Description     arrivals | lengths | sessions | reuse (with ideal caches: reuse_curve)

Any requests will do: a trace's, a generator's, a learned model's.
"""
