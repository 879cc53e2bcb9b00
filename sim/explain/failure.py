"""One failed request: what its message tells, as facts that ``classify`` judges, with what rounding leaves open.

::

    device                = free + this process + others + what nobody names
    this process          = reserved by its allocator + context, communication buffers, graphs
    reserved              = allocated + reserved but unallocated (+ free in the private pools of graphs)

Three readings of the same figures: as printed, and with every rounding against and for the request. They are judged
apart; where they disagree the figures do not settle the cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hbmtwin.allocators.oom import Cause, OomFacts, classify
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.printed import Printed, give_of

GIB = 1 << 30
KINDS = ("torch_oom", "npu_oom", "npu_workspace_oom", "torch_driver_oom", "npu_driver_oom")

OWN_MOST_BYTES = {"NPU": 11 * GIB // 2, "CUDA": 9 * GIB // 2}
"""What one server holds outside of torch's allocator at most in public logs: context and communicators 2.05 GiB before
and 2.17 GiB while profiling on H100 (vLLM 0.19, MoE with tensor parallelism); on an NPU it grew to over 5 GB without
expandable segments (vllm-ascend 5855). More than that belongs to somebody else; an estimate."""

DRIVER_REST_BYTES = GIB
"""What no process is named for though all are listed: the driver's own, at most."""

DRIVER_KEEPS_BYTES = 48 << 20
"""What a driver reports as free on a full device and yet does not hand out: 32 MiB were refused beside 41.56 MiB free
on a GPU of 4 GiB (MyGirlGPT 11), 18 MiB beside 20.04 MiB free on a 910B (MinerU); an estimate."""

EXABYTE = 1 << 60

MOST_NEIGHBOURS = 1_000
"""Findings of a kind that are looked at beside a failure: more than the ranks, devices and processes of a paste."""
_NEIGHBOURS = {
    "npu_smi_device": "device",
    "nvidia_smi_device": "device",
    "npu_smi_process": "process",
    "nvidia_smi_process": "process",
    "memory_summary": "table",
    "memory_stats": "table",
    "moment": "moment",
    "setting": "setting",
}


class Tenant(NamedTuple):
    """Another process on the device."""

    pid: int
    """0: not told."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Around:
    """What was read beside the failures, by what it is good for; of each the last, which is nearest to the end."""

    devices: tuple[Finding, ...]
    processes: tuple[Finding, ...]
    tables: tuple[Finding, ...]
    """Summaries of allocators."""
    weights: tuple[Finding, ...]
    moments: tuple[Finding, ...]
    confs: tuple[str, ...]
    """Texts of PYTORCH_..._ALLOC_CONF."""
    settings: Mapping[str, int]

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Around:
        """Sorted out once for all failures of a text. O(findings)."""
        by_kind: dict[str, deque[Finding]] = {}
        for finding in findings:
            kind = "weights" if "weights_bytes" in finding.numbers else _NEIGHBOURS.get(finding.kind, "")
            by_kind.setdefault(kind, deque(maxlen=MOST_NEIGHBOURS)).append(finding)
        of = {kind: tuple(found) for kind, found in by_kind.items()}
        settings = of.get("setting", ())
        return cls(
            devices=of.get("device", ()),
            processes=of.get("process", ()),
            tables=of.get("table", ()),
            weights=of.get("weights", ()),
            moments=of.get("moment", ()),
            confs=tuple(conf for other in settings for conf in other.words.values()),
            settings={name: int(value) for other in settings for name, value in other.numbers.items()},
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request with everything that was read about it."""

    finding: Finding
    family: str
    """CUDA, HIP, XPU or NPU."""
    facts: OomFacts
    """By the figures as printed; what is not told is 0."""
    causes: tuple[Cause, ...]
    """What the figures allow: one when they settle it, none when they do not tell enough."""
    asked: Printed | None
    free: Printed | None
    servable: Printed | None
    """Of what is free, what the driver would hand out: nothing where it refused although the little left was enough."""
    cached: Printed | None
    """Reserved and not allocated, without private pools."""
    reserved: Printed | None
    outside: Printed | None
    """Used on the device and not by this process, or not by its allocator when its whole is not told."""
    own: Printed | None
    """This process in all, when told."""
    tenants: tuple[Tenant, ...]
    tenants_estimated: bool
    taken_for_own: Tenant | None
    """Of a list that does not say which it is: the process that holds what PyTorch reserved here."""

    @property
    def graphs_keep_it(self) -> bool:
        """Whether it is enough only with what lies free in graphs' private pools."""
        if not self.told("private_free_bytes") or self.asked is None or self.cached is None:
            return False
        return self.facts.driver_free_bytes + self.cached < self.asked

    @property
    def mostly_outside(self) -> bool:
        """Whether more of the device is used outside of this process's allocator than by it, and nobody is named."""
        if self.outside is None or self.reserved is None or self.own is not None or self.tenants or self.taken_for_own:
            return False
        return self.outside.low > self.reserved.high

    @property
    def mostly_others(self) -> bool:
        """Whether other processes hold more than half of the device."""
        return 2 * self.facts.tenants_bytes > self.facts.capacity_bytes > 0

    def told(self, name: str) -> Printed | None:
        """A number of its message, None when it does not tell it."""
        return _printed(self.finding.numbers, name)

    @property
    def cap_left(self) -> int | None:
        """What a memory fraction still allows; None without one."""
        allowed = self.told("allowed_bytes")
        if allowed is None:
            return None
        return int(max(0, allowed - (self.reserved or 0)))


def failure_of(finding: Finding, around: Around) -> Failure:
    """What *finding*, one of :data:`KINDS`, and its neighbours tell of one failed request. O(neighbours)."""
    numbers = {**_summary(finding, around), **finding.numbers}
    family = finding.words.get("family", "CUDA")
    asked = Printed(EXABYTE) if finding.words.get("refused") == "1EB" else _printed(numbers, "asked_bytes")
    total, free = _printed(numbers, "total_bytes"), _printed(numbers, "free_bytes")
    allocated, active = _printed(numbers, "allocated_bytes"), _printed(numbers, "active_bytes")
    private = _printed(numbers, "private_free_bytes")
    unallocated, reserved = _printed(numbers, "unallocated_bytes"), _printed(numbers, "reserved_bytes")
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = _plus(allocated, unallocated)
    in_use = active or allocated
    if unallocated is None and reserved is not None and in_use is not None:
        unallocated = _minus(reserved, in_use)
    own = _printed(numbers, "process_bytes")
    outside = None
    if total is not None and free is not None and (own or reserved) is not None:
        outside = _minus(_minus(total, free), own if own is not None else reserved or Printed(0))
    tenants, estimated, mine = _tenants(finding, around, family, reserved, own, outside)
    tenants_bytes = sum(tenant.bytes for tenant in tenants)
    if outside is not None:
        tenants_bytes = min(tenants_bytes, outside.high)
    allowed = _printed(numbers, "allowed_bytes")
    limit = allowed if allowed is not None and (total is None or allowed < total) else total
    left = free
    if free is not None and allowed is not None:
        left = None if reserved is None else min(free, _minus(allowed, reserved), key=int)
    servable = free
    if free is not None and free < DRIVER_KEEPS_BYTES and asked is not None and _largest(asked, left) >= asked:
        servable = left = Printed(0)
    cached = unallocated if private is None or unallocated is None else _plus(unallocated, private)
    if finding.kind == "npu_workspace_oom":  # no cached block can serve it
        cached = None
    facts = OomFacts(
        allocator="caching" if finding.kind in ("torch_oom", "npu_oom") else "driver",
        asked_bytes=int(asked or 0),
        need_bytes=int(asked or 0),
        tag=None,
        owner=-1,
        stream=0,
        capacity_bytes=int(total or 0),
        limit_bytes=int(limit or 0),
        reserved_bytes=int(reserved or 0),
        allocated_bytes=int(allocated or 0),
        requested_bytes=0,
        largest_free_bytes=_largest(asked, left),
        cached_free_bytes=int(cached or 0),
        driver_free_bytes=int(left or 0),
        rule="driver" if asked and _largest(asked, left) >= asked else "",
        weights_bytes=_weights(finding, around),
        tenants_bytes=tenants_bytes,
        pending_bytes=int(max(0, active - allocated)) if active is not None and allocated is not None else 0,
    )
    causes = _causes(finding, facts, asked, limit, left, cached, total, in_use)
    return Failure(
        finding,
        family,
        facts,
        causes,
        asked,
        free,
        servable,
        unallocated,
        reserved,
        outside,
        own,
        tenants,
        estimated,
        mine,
    )


def _causes(
    finding: Finding,
    facts: OomFacts,
    asked: Printed | None,
    limit: Printed | None,
    left: Printed | None,
    cached: Printed | None,
    total: Printed | None,
    in_use: Printed | None,
) -> tuple[Cause, ...]:
    """The causes that the figures allow: read as printed, and with all roundings against and for the request."""
    if asked is None:
        return ()
    if asked >= EXABYTE:
        return (Cause.NEVER_FITS,)
    if limit is None:
        return ()
    if left is None:
        return (Cause.NEVER_FITS,) if asked.low > limit.high else ()
    most_cached, silent = cached, False
    if cached is None and finding.kind != "npu_workspace_oom":
        if total is None or in_use is None:
            return ()
        most_cached, silent = Printed(max(0, total.high - left.low - in_use.low)), True
    against = replace(
        facts,
        need_bytes=asked.high,
        limit_bytes=limit.low,
        driver_free_bytes=left.low,
        cached_free_bytes=cached.low if cached is not None else 0,
        pending_bytes=0 if facts.pending_bytes <= 2 * give_of(in_use or 0) else facts.pending_bytes,
    )
    towards = replace(
        facts,
        need_bytes=asked.low,
        limit_bytes=limit.high,
        driver_free_bytes=left.high,
        cached_free_bytes=most_cached.high if most_cached is not None else 0,
    )
    readings = (classify(facts), classify(against), classify(towards))
    causes = tuple(dict.fromkeys(readings))
    if silent and causes != (Cause.SHORTAGE,) and causes != (Cause.NEVER_FITS,):
        return ()  # what was cut off could be a cap, or say that it was enough
    return causes


def _largest(asked: Printed | None, left: Printed | None) -> int:
    """The driver's free bytes, which it can map in one piece. Printed like what was asked they were less: it failed."""
    if asked is None or left is None:
        return 0
    return int(left) if left.low >= asked.high or left < asked else asked.low - 1


def _tenants(
    finding: Finding,
    around: Around,
    family: str,
    reserved: Printed | None,
    own: Printed | None,
    outside: Printed | None,
) -> tuple[tuple[Tenant, ...], bool, Tenant | None]:
    """The other processes, as the message lists them, as a device listing does, or (then True) as what one server would
    not hold; and which of them was taken for the reader's own."""
    most = OWN_MOST_BYTES["NPU" if family == "NPU" else "CUDA"]
    numbers = finding.numbers
    listed = [
        Tenant(int(numbers[f"other_{at}_pid"]), int(numbers[f"other_{at}_bytes"]))
        for at in range(64)
        if f"other_{at}_pid" in numbers
    ]
    if not listed:
        listed = _listed_by_device_tool(finding, around)
    mine = None
    if own is None and reserved is None:
        return (), False, None  # which of them is the reader's own cannot be told
    if own is None and reserved is not None:
        like = [tenant for tenant in listed if reserved.low <= tenant.bytes + GIB // 200 <= reserved.high + most]
        if like:
            mine = min(like, key=lambda tenant: tenant.bytes)
            listed.remove(mine)
    if listed or mine:
        return tuple(sorted(listed, key=lambda tenant: -tenant.bytes)), False, mine
    if outside is None:
        return (), False, None
    rest = outside.low - (DRIVER_REST_BYTES if own is not None else most)
    return ((Tenant(0, rest),), True, None) if rest > 0 else ((), False, None)


def _listed_by_device_tool(finding: Finding, around: Around) -> list[Tenant]:
    """Processes on the same device in a listing that was pasted too: by torch's index, or the only device."""
    index = finding.numbers.get("device")
    chosen = [other for other in around.devices if len(around.devices) == 1 or other.numbers["index"] == index]
    if not chosen:
        return []
    place = chosen[-1].numbers
    process = chosen[-1].kind.replace("_device", "_process")
    seen: dict[int, int] = {}
    for other in around.processes:
        same = other.kind == process and other.numbers["device"] == place["device"]
        if same and other.numbers.get("chip") == place.get("chip"):
            seen[int(other.numbers["pid"])] = int(other.numbers["used_bytes"])
    return [Tenant(pid, used) for pid, used in seen.items()]


def _summary(finding: Finding, around: Around) -> dict[str, int | float]:
    """What a summary of the same rank tells of an allocator whose message is silent."""
    if finding.kind in ("torch_oom", "npu_oom") and "allocated_bytes" in finding.numbers:
        return {}
    same = [other for other in around.tables if other.rank == finding.rank]
    names = ("allocated_bytes", "active_bytes", "reserved_bytes")
    return {name: same[-1].numbers[name] for name in names if name in same[-1].numbers} if same else {}


def _weights(finding: Finding, around: Around) -> int:
    """The weights of that rank, when a boot log told them."""
    told = [int(other.numbers["weights_bytes"]) for other in around.weights if other.rank in (finding.rank, "")]
    return told[-1] if told else 0


def _printed(numbers: Mapping[str, int | float], name: str) -> Printed | None:
    number = numbers.get(name)
    if number is None:
        return None
    return number if isinstance(number, Printed) else Printed(int(number))


def _plus(a: Printed, b: Printed) -> Printed:
    return Printed(a + b, a.give + b.give)


def _minus(a: Printed, b: Printed) -> Printed:
    return Printed(max(0, a - b), a.give + b.give)
