"""A learned model of traffic: clients, each with windows of arrivals, measured lengths, and what its prompts share.

::

    TrafficModel      span_s, window_s: the stretch that was seen, and how it is cut; afterwards it begins anew
      Client          one where the trace names none
        Window        start_s, request_rate, family and shape of the gaps within          (only those with requests)
        minute_cv     how much the rate of a minute moves within its window
        LengthWindow  from start_s on: prompt tokens, and output tokens by classes of the prompt
        Sharing       system prompt; who continues an earlier prompt, after how long, and how much of it is old

Plain records, checked when they are made; ``model_file`` writes them as TOML and reads them, ``learn`` makes them from
a trace and ``servegen`` from ServeGen's files, ``traffic`` makes requests of them. The shape of the model is that of
ServeGen (Xiang et al., 2025); the drift within windows and what is said of sharing are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.strata import MAX_CLIENTS
from hbmtwin.workloads.lengths import MAX_TOKENS
from hbmtwin.workloads.records import WorkloadError

Family = Literal["gamma", "weibull"]
FAMILIES: Final = ("gamma", "weibull")
MAX_RATE = 1e6
"""Requests a second of one client."""
MAX_SPAN_S = 1e9
MAX_WINDOWS = 10_000_000
"""Of one pass: generated traffic looks at each, empty ones too."""


class Window(NamedTuple):
    """How one client's requests arrive in one window."""

    start_s: float
    request_rate: float
    family: Family
    shape: float
    """Of the gaps; 1 is Poisson, less is burstier. A gamma's CV is 1 / sqrt(shape)."""


@dataclass(frozen=True, slots=True)
class LengthWindow:
    """Lengths from *start_s* on, until the next of these. Output lengths have a table for each class of prompts, whose
    upper bounds *prompt_below* names but for the last, where they depend on the prompt at all."""

    start_s: float
    prompt_tokens: Measured
    output_tokens: tuple[Measured, ...]
    prompt_below: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(0 <= self.start_s <= MAX_SPAN_S, f"start_s is from 0 to 1e9, not {self.start_s}")
        _check(
            len(self.output_tokens) == len(self.prompt_below) + 1,
            f"{len(self.prompt_below)} bounds in prompt_below need {len(self.prompt_below) + 1} tables of "
            f"output_tokens, not {len(self.output_tokens)}",
        )
        _check(all(a < b for a, b in pairwise(self.prompt_below)), "prompt_below must rise")


@dataclass(frozen=True, slots=True)
class Sharing:
    """What prompts have in common with earlier ones of the same client.

    Every prompt begins with the system prompt. Of the prompts of each class (upper bounds *prompt_below*, but for the
    last), the share *follow_share* goes on from one that was sent a time before of which *follow_after_s* holds equally
    spaced quantiles, and has a part in common with it of which *shared_part* holds, for each class, equally spaced
    quantiles.
    """

    block_size: int
    """Tokens of the blocks that sharing was measured in."""
    system_prompt_tokens: int
    follow_share: tuple[float, ...]
    shared_part: tuple[tuple[float, ...], ...]
    follow_after_s: tuple[float, ...]
    prompt_below: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        classes = len(self.prompt_below) + 1
        _check(1 <= self.block_size <= MAX_TOKENS, f"block_size is from 1 to 2^40, not {self.block_size}")
        _check(
            0 <= self.system_prompt_tokens <= MAX_TOKENS,
            f"system_prompt_tokens is from 0 to 2^40, not {self.system_prompt_tokens}",
        )
        _check(all(a < b for a, b in pairwise(self.prompt_below)), "prompt_below must rise")
        _check(
            len(self.follow_share) == len(self.shared_part) == classes,
            f"{classes - 1} bounds in prompt_below need {classes} of follow_share and shared_part, not "
            f"{len(self.follow_share)} and {len(self.shared_part)}",
        )
        _check(all(0 <= share <= 1 for share in self.follow_share), "follow_share is from 0 to 1")
        for parts in self.shared_part:
            _check(
                len(parts) >= 2 and parts[0] >= 0 and parts[-1] <= 1 and all(a <= b for a, b in pairwise(parts)),
                "shared_part has two or more parts from 0 to 1 that do not fall",
            )
        after = self.follow_after_s
        _check(
            len(after) >= 2 and after[0] >= 0 and after[-1] <= MAX_SPAN_S and all(a <= b for a, b in pairwise(after)),
            "follow_after_s has two or more times from 0 to 1e9 that do not fall",
        )


@dataclass(frozen=True, slots=True)
class Client:
    """One sender of requests. Without *lengths* those of :attr:`TrafficModel.pooled` are its own."""

    id: int
    windows: tuple[Window, ...]
    lengths: tuple[LengthWindow, ...] = ()
    minute_cv: float = 0.0
    """Standard deviation / mean of the rates of the minutes within a window."""
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.id < MAX_CLIENTS, f"id is from 0 to {MAX_CLIENTS - 1}, not {self.id}")
        _check(0 <= self.minute_cv <= 10, f"minute_cv is from 0 to 10, not {self.minute_cv}")
        for window in self.windows:
            _check(0 < window.request_rate <= MAX_RATE, f"request_rate is above 0 and up to 1e6, not {window[1]}")
            _check(window.family in FAMILIES, f"family is gamma or weibull, not {window.family!r}")
            _check(1e-9 <= window.shape <= 1e6, f"shape is from 1e-9 to 1e6, not {window.shape}")
        _check(all(a.start_s < b.start_s for a, b in pairwise(self.windows)), "windows must be in order of start_s")
        _check(all(a.start_s < b.start_s for a, b in pairwise(self.lengths)), "lengths must be in order of start_s")


@dataclass(frozen=True, slots=True)
class TrafficModel:
    """Traffic of a stretch of *span_s* seconds, cut into windows of *window_s*. Raise WorkloadError where the parts do
    not go together."""

    source: str
    """What it was learned from."""
    span_s: float
    window_s: float
    clients: tuple[Client, ...]
    pooled: LengthWindow | None = None
    """Lengths of the clients that have none of their own."""
    notes: tuple[str, ...] = ()
    """What the reader of this model should know of it."""

    def __post_init__(self) -> None:
        _check(0 < self.window_s <= MAX_SPAN_S, f"window_s is above 0 and up to 1e9, not {self.window_s}")
        _check(0 < self.span_s <= MAX_SPAN_S, f"span_s is above 0 and up to 1e9, not {self.span_s}")
        _check(
            self.span_s / self.window_s <= MAX_WINDOWS,
            f"span_s / window_s is at most {MAX_WINDOWS:,} windows, not {self.span_s / self.window_s:.3g}",
        )
        _check(len({client.id for client in self.clients}) == len(self.clients), "each client has its own id")
        _check(any(client.windows for client in self.clients), "no client sends anything; give one a window")
        for client in self.clients:
            for window in client.windows:
                index = window.start_s / self.window_s
                _check(
                    0 <= window.start_s < self.span_s and math.isclose(index, round(index), abs_tol=1e-6),
                    f"client {client.id}: start_s of a window is a multiple of window_s below span_s, "
                    f"not {window.start_s}",
                )
            if client.windows and not client.lengths and self.pooled is None:
                raise WorkloadError(f"client {client.id} has no lengths, and there is no [pooled]; give one of the two")

    @property
    def num_windows(self) -> int:
        """How many windows the span has; the last one may be shorter."""
        return max(1, math.ceil(self.span_s / self.window_s - 1e-9))

    def window_length_s(self, index: int) -> float:
        """Seconds of a window."""
        return min(self.window_s, self.span_s - index * self.window_s)

    def expected_requests(self, clients: Sequence[Client]) -> float:
        """Of one pass through the span."""
        return sum(
            window.request_rate * self.window_length_s(round(window.start_s / self.window_s))
            for client in clients
            for window in client.windows
        )

    @property
    def request_rate(self) -> float:
        """Requests a second in the mean of the span."""
        return self.expected_requests(self.clients) / self.span_s


def _check(holds: bool, cure: str) -> None:
    if not holds:
        raise WorkloadError(cure)
