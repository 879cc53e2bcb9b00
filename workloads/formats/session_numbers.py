"""A number for a session that its trace names by a text, such as a UUID: of the text alone, so nothing is kept."""

from __future__ import annotations

import hashlib
from typing import Any

_LEAST = 1 << 52
"""Above the number of any line, which a request without a session has for one; all are below 2^53, exact in JSON."""


def session_number(name: Any) -> int | None:
    """From 2^52 to 2^53, None for an empty name. Two of a million names clash with a chance of 1 in 10,000."""
    text = "" if name is None else str(name).strip()
    if not text:
        return None
    return _LEAST | (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 12)
