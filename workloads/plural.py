"""A number and what it counts, as people write it."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1 client``, ``0 clients``, ``1,234 requests``; *noun* takes an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def were(number: int) -> str:
    """The verb that goes with so many."""
    return "was" if number == 1 else "were"
