"""What a static batch spends on padding: counts over results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from claim import simulate

BATCHINGS: Final[Mapping[str, str]] = {
    "as they come": "padded",
    "sorted by prompt": "sorted",
    "buckets of 256": "buckets",
    "variable length": "variable",
}
"""``scheduler.batching`` by the words of the table."""
EQUAL_ANSWERS: Final = "workload.output_tokens=200"
"""Nothing but prompts differ."""


@dataclass(frozen=True)
class Padding:
    """Shares are of what was computed, and of the bytes that hold tokens or padding, weighed by time."""

    compute_share: float
    byte_share: float
    peak_bytes: int
    """The most that tokens and padding take at once."""


def paddings(id: str, *overrides: str) -> dict[str, Padding]:
    """The padding of one traffic under each way to form batches."""
    return {words: padding(id, f"scheduler.batching={name}", *overrides) for words, name in BATCHINGS.items()}


def padding(id: str, *overrides: str) -> Padding:
    """Run and count. The last token that a request samples is not computed."""
    result = simulate(id, *overrides)
    requests, steps, line = result.requests, result.steps, result.timeline
    assert set(requests["status"]) == {"completed"}
    assert steps is not None
    computed = sum(sum(new) * repeat for new, repeat in zip(steps["new_tokens"], steps["repeat"], strict=True))
    own = int((requests["prompt_tokens"] + requests["output_tokens"] - 1).sum())
    slots = line["kv_tokens"] + line["kv_padding"]
    time_ns = line["time_ns"].to_numpy(float)
    byte_share = np.trapezoid(line["kv_padding"], time_ns) / np.trapezoid(slots, time_ns)
    return Padding(1 - own / computed, float(byte_share), int(slots.max()))
