"""What the engine is told, and what it tells on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hbmtwin.sim.calibration import ValidityWatch


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine itself must know of the scenario."""

    oom: Literal["stop", "reject", "preempt"]
    arena_limit_bytes: int
    """What the KV arena may have of the device."""
    between_turns: Literal["keep", "drop", "prefix_cache"] = "drop"
    drops_tokens: bool = False
    """Whether the KV policy's retention drops tokens, which attention then does not read."""
    counts_dropped: bool = False
    """Whether a retention was asked for: what a model's own windows leave behind is not lost to it."""
    window: int = 0
    """Tokens of the sliding window of those layers that have one; 0: none has."""
    fixed_pool: bool = False
    """Whether the KV policy has all of its memory from the start, in blocks."""
    keeps_parked: bool = False
    """Whether the KV policy can park a session's buffers (``keep`` means nothing elsewhere)."""
    max_concurrency: int | None = None
    """Most requests in the server; the others wait at their clients."""
    step_mode: bool = False
    validity: ValidityWatch | None = None
    """Counts steps outside of what a calibration profile was measured for; None: there is none."""


class Progress(NamedTuple):
    """How far a run is."""

    simulated_s: float
    completed: int
    total: int | None
    running: int
