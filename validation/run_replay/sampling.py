"""Which steps of a run are timed, where all of them would take too long: the same ones every time.

::

    kind       steps of the run                      timed of 12
    prefill    o o o o o o                           3   at even distances, the heaviest among them
    mixed      o o o o o o o o o o                   3
    decode     o o o o o o o o o o o o ... o         6   the rest goes to the kind with the most steps

Each kind of step gets a share by its number, and at least one; within a kind every n-th step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

StepKind = Literal["prefill", "mixed", "decode"]
KINDS: tuple[StepKind, ...] = ("prefill", "mixed", "decode")


class Batch(NamedTuple):
    """What one step computes attention for."""

    row: int
    """Of the table of steps."""
    step: int
    new_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    """Tokens in front of these."""
    duration_ns: int
    """Of one step, as predicted."""

    @property
    def kind(self) -> StepKind:
        """One new token is decode."""
        decodes = sum(new == 1 for new in self.new_tokens)
        return "decode" if decodes == len(self.new_tokens) else "mixed" if decodes else "prefill"

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees: by this a step is heavy or light."""
        return sum(n * c + n * (n + 1) // 2 for n, c in zip(self.new_tokens, self.context_tokens, strict=True))


def sample(batches: Sequence[Batch], most: int) -> list[Batch]:
    """At most *most* of them, in order of steps; all where there are no more. O(steps log steps).

    With fewer than there are kinds, the kinds with the most steps have one each.
    """
    if len(batches) <= most:
        return list(batches)
    by_kind = {kind: [b for b in batches if b.kind == kind] for kind in KINDS}
    present = sorted((kind for kind in KINDS if by_kind[kind]), key=lambda kind: -len(by_kind[kind]))[:most]
    shares = {kind: max(1, most * len(by_kind[kind]) // len(batches)) for kind in present}
    while sum(shares.values()) > most:
        largest = max(present, key=lambda kind: shares[kind])
        shares[largest] -= 1
    if present:
        shares[present[0]] += most - sum(shares.values())
    chosen = [b for kind in present for b in _evenly(by_kind[kind], shares[kind])]
    return sorted(chosen, key=lambda b: b.row)


def _evenly(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Every n-th of them, the heaviest in place of its nearest neighbour."""
    if count >= len(batches):
        return list(batches)
    places = [(2 * i + 1) * len(batches) // (2 * count) for i in range(count)]
    heaviest = max(range(len(batches)), key=lambda i: batches[i].pairs)
    nearest = min(range(count), key=lambda i: abs(places[i] - heaviest))
    places[nearest] = heaviest
    return [batches[i] for i in sorted(places)]
