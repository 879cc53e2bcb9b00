"""What was read of a pasted text, before anything is concluded from it.

::

    pasted text --clean--> lines with their numbers --readers--> findings --> cause, arithmetic, advice

A reader knows the forms of one family of messages (torch's, torch_npu's, a boot log, npu-smi ...), all releases of
them, and returns what it found; it concludes nothing. Reading is linear in the text, and executes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Line(NamedTuple):
    """One line of the pasted text, without colours, time stamps and the prefixes of loggers and workers."""

    number: int
    """From 1, in the text as it was pasted."""
    text: str
    rank: str = ""
    """Of the worker that wrote it, as the log names it (``TP0``, ``rank 3``, ``EngineCore``); empty: not told."""


class Finding(NamedTuple):
    """One message that was understood."""

    kind: str
    """``torch_oom``, ``npu_oom``, ``boot_available_kv`` ...: the reader's own list of kinds."""
    line: int
    """Where it begins."""
    rank: str
    numbers: Mapping[str, int | float]
    """By name, units in the names: bytes are ``*_bytes``. What the message does not tell is not there."""
    words: Mapping[str, str] = {}
    """Names that it tells: a device, a model, a setting."""
    rounded: bool = False
    """Whether sizes were printed with two decimals, so that bytes are known to half a unit of the last one only."""


Reader = Callable[[Sequence[Line]], list[Finding]]
"""Reads the lines of one text. Never raises for what it cannot read: that is left out."""
