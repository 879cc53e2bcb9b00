"""Out of memory is a first-class result: the exception, the record, and the one cause.

:func:`classify` is pure, so that a pasted error message can be judged by the same rules as a simulated death
(what the message does not tell is 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from hbmtwin.allocators.records import Tag


class Cause(Enum):
    """Why a request did not fit. Each value is the first that explains it, in this order."""

    NEVER_FITS = "never_fits"
    ALLOCATOR_RULE = "allocator_rule"
    EXTERNAL_FRAGMENTATION = "external_fragmentation"
    GROWTH_COPY = "growth_copy"
    RESERVATION = "reservation"
    PARKED_HISTORY = "parked_history"
    OTHER_TENANT = "other_tenant"
    RUNTIME_PEAK = "runtime_peak"
    SHORTAGE = "shortage"


@dataclass(frozen=True, slots=True)
class OomFacts:
    """Everything that is known at the moment of failure, in bytes. The allocator fills what it knows, the engine adds
    the terms of KV and step (:func:`dataclasses.replace`); unknown is 0."""

    allocator: str
    asked_bytes: int
    need_bytes: int
    """Rounded size: what must lie in one piece."""
    tag: Tag | None
    owner: int
    stream: int
    capacity_bytes: int
    limit_bytes: int
    """min(capacity, cap)."""
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    largest_free_bytes: int
    """Largest free run anywhere: the driver's free bytes within the cap, or a cached block."""
    cached_free_bytes: int
    """Free bytes inside what this arena has reserved."""
    driver_free_bytes: int
    """Free at the driver, and allowed by the cap."""
    rule: str = ""
    """The rule that bars a free run that would be large enough; empty when none does."""
    weights_bytes: int = 0
    static_bytes: int = 0
    owner_bytes: int = 0
    """Live bytes of the owner that asked."""
    growth_copy_bytes: int = 0
    unfilled_bytes: int = 0
    rounding_bytes: int = 0
    other_arenas_free_bytes: int = 0
    parked_bytes: int = 0
    tenants_bytes: int = 0
    transient_bytes: int = 0
    """Activations and workspace of this step."""
    pending_bytes: int = 0
    fixed_pool: bool = False
    """A pool of blocks was asked, which has all of its memory from the start: what is free elsewhere is no help."""

    @property
    def free_bytes(self) -> int:
        """Free in total, for this arena."""
        return self.driver_free_bytes + self.cached_free_bytes


def classify(facts: OomFacts) -> Cause:
    """Name the one cause of a failed request. Pure; O(1).

    1. The owner alone would not fit in the empty device: ``never_fits``.
    2. A free run is large enough and a rule bars it: ``allocator_rule``.
    3. Then terms are added to what is free, in order, until the request would fit; the term that makes it fit is
       the cause. When none does it is a plain ``shortage``. Of a fixed pool only what its own sequences hold counts.
    """
    f = facts
    if f.need_bytes + f.owner_bytes > f.limit_bytes - f.weights_bytes - f.static_bytes:
        return Cause.NEVER_FITS
    if f.largest_free_bytes >= f.need_bytes:
        return Cause.ALLOCATOR_RULE
    elsewhere = 0 if f.fixed_pool else 1
    free = 0
    for cause, term in (
        (Cause.EXTERNAL_FRAGMENTATION, f.driver_free_bytes + f.cached_free_bytes),
        (Cause.GROWTH_COPY, f.growth_copy_bytes),
        (Cause.RESERVATION, f.unfilled_bytes + elsewhere * (f.rounding_bytes + f.other_arenas_free_bytes)),
        (Cause.PARKED_HISTORY, f.parked_bytes),
        (Cause.OTHER_TENANT, elsewhere * f.tenants_bytes),
        (Cause.RUNTIME_PEAK, elsewhere * (f.transient_bytes + f.pending_bytes)),
    ):
        free += term
        if free >= f.need_bytes:
            return cause
    return Cause.SHORTAGE


class OutOfMemory(Exception):
    """A device allocator cannot serve a request. ``facts`` is its side of the record."""

    def __init__(self, facts: OomFacts, done: Sequence[int] = (), *, torch_message: str = "") -> None:
        super().__init__(
            f"{facts.allocator}: {facts.need_bytes} bytes needed, {facts.free_bytes} free, "
            f"largest piece {facts.largest_free_bytes}"
        )
        self.facts = facts
        self.done = tuple(done)
        """New handles of the tensors that :meth:`DeviceAllocator.regrow` had already replaced."""
        self.torch_message = torch_message
        """What the real allocator prints, where there is one."""

    def after(self, done: Sequence[int]) -> OutOfMemory:
        """The same failure, knowing which tensors had been replaced before it."""
        return OutOfMemory(self.facts, done, torch_message=self.torch_message)


@dataclass(frozen=True, slots=True)
class OomRecord:
    """The record that a run's result keeps: when, who, the facts, and the cause."""

    time_ns: int
    request: int
    """Id of the request whose sequence asked, -1 when none did."""
    cause: Cause
    facts: OomFacts
    torch_message: str = ""
    """What the real allocator would have printed, where it is one of torch's."""

    @classmethod
    def of(cls, facts: OomFacts, *, time_ns: int, request: int, torch_message: str = "") -> OomRecord:
        """The record of complete facts, with the cause named."""
        return cls(time_ns, request, classify(facts), facts, torch_message)

    def to_dict(self) -> dict[str, object]:
        """A flat dictionary of JSON values, the cause first."""
        facts = asdict(self.facts)
        facts["tag"] = None if self.facts.tag is None else self.facts.tag.name.lower()
        facts["free_bytes"] = self.facts.free_bytes
        return {
            "cause": self.cause.value,
            "time_s": self.time_ns / 1e9,
            "request": self.request,
            **facts,
            "torch_message": self.torch_message,
        }
