"""Keyed draws that leave no part of a distribution out: of every 1024 in a row, each takes its own 1024th.

::

    serial         0     1     2    ...  1023 | 1024  1025 ...
    stratum       713    20   901   ...   388 |   94   640 ...     a new keyed shuffle for each 1024
    number        (stratum + uniform) / 1024

A number alone is uniform, and its neighbours tell next to nothing about it; but what many of them draw from a table of
measured lengths has the table's quantiles within a thousandth, where independent draws scatter with the square root of
their number. The shuffle is a Feistel network of four rounds over two halves of 5 bits, its round function a keyed
draw (Luby and Rackoff, SIAM J. Comput. 17, 1988): O(1) a number, and nothing is kept.
"""

from __future__ import annotations

import numpy as np

from hbmtwin.workloads import draws
from hbmtwin.workloads.draws import FloatArray, IntArray

STRATA = 1024
MAX_CLIENTS = 2**19
_HALF_BITS, _HALF_MASK, _ROUNDS = 5, 31, 4
_SERIAL_BITS = 40
_BELOW_ONE = 1.0 - 2.0**-53


def client_keys(client: int, serials: IntArray) -> IntArray:
    """The session number by which a draw for the *serials* of a client is keyed."""
    return np.int64(client) << np.int64(_SERIAL_BITS) | serials


def stratified(seed: int, purpose: str, client: int, serials: IntArray) -> FloatArray:
    """A number strictly between 0 and 1 for each serial number (below 2^40) of one client. O(serials)."""
    cells = client_keys(client, serials >> 10) << np.int64(_HALF_BITS)
    left, right = serials >> _HALF_BITS & _HALF_MASK, serials & _HALF_MASK
    for turn in range(_ROUNDS):
        mixed = (draws.uniforms(seed, purpose, cells | right, turn) * (_HALF_MASK + 1)).astype(np.int64)
        left, right = right, left ^ mixed
    within = draws.uniforms(seed, purpose, client_keys(client, serials), _ROUNDS)
    return np.minimum(((left << _HALF_BITS | right) + within) / STRATA, _BELOW_ONE)
