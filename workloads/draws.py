"""Keyed random numbers: a draw is a pure function of (seed, purpose, session, turn), never the next of a stream.

So no draw depends on who asked before it: traffic is the same under every policy, and changing the model of one
purpose moves no other. The generator is counter based, SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) used as a hash:
its finaliser is applied to the key, then to the session, then to the turn. It runs on Python integers, for a single
draw (about 1 us), and on arrays, for many sessions at once (about 20 ns a draw), with the same bits.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB


class Purpose(StrEnum):
    """What a draw is for. Each purpose has draws of its own; here are all that this folder uses."""

    ARRIVAL = "arrival"
    ARRIVAL_REJECTION = "arrival_rejection"
    ARRIVAL_BOOST = "arrival_boost"
    BURST = "burst"
    TURNS = "turns"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"
    THINK_TIME = "think_time"
    COMMON_PREFIX = "common_prefix"
    SESSION_PREFIX = "session_prefix"
    PRIORITY = "priority"
    PREFIX = "prefix"
    PREFIX_TOKENS = "prefix_tokens"
    CLIENT = "client"
    WINDOW_REQUESTS = "window_requests"
    CLIENTS = "clients"
    FOLLOWS = "follows"
    FOLLOW_AFTER = "follow_after"
    SHARED_PART = "shared_part"
    JITTER = "jitter"


def bits(seed: int, purpose: str, session: int, turn: int) -> int:
    """64 random bits of one key. O(1)."""
    return _mix(_mix(_key(seed, purpose) + _GOLDEN * (session + 1)) + _GOLDEN * (turn + 1))


def uniform(seed: int, purpose: str, session: int, turn: int) -> float:
    """A number strictly between 0 and 1, on a grid of 2^-52. O(1)."""
    return ((bits(seed, purpose, session, turn) >> 12) + 0.5) * 2.0**-52


def uniforms(seed: int, purpose: str, sessions: IntArray, turn: int) -> FloatArray:
    """:func:`uniform` of many sessions in the same turn, bit by bit the same numbers. O(sessions)."""
    golden = np.uint64(_GOLDEN)
    x = _mix_array(np.uint64(_key(seed, purpose)) + golden * (sessions.astype(np.uint64) + np.uint64(1)))
    x = _mix_array(x + np.uint64(_GOLDEN * (turn + 1) & _MASK))
    grid: FloatArray = (x >> np.uint64(12)).astype(np.float64)
    return (grid + 0.5) * 2.0**-52


@lru_cache(maxsize=256)
def _key(seed: int, purpose: str) -> int:
    # blake2b, not hash(): Python salts the hash of a string anew in every process.
    name = int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8).digest(), "little")
    return _mix(_mix(seed) ^ name)


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * _MULTIPLY_1 & _MASK
    z = (z ^ (z >> 27)) * _MULTIPLY_2 & _MASK
    return z ^ (z >> 31)


def _mix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MULTIPLY_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MULTIPLY_2)
    return z ^ (z >> np.uint64(31))
