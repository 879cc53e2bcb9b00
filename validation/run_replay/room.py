"""How much of a model fits beside what else the machine does: looked at before a byte is taken, so that nothing swaps.

::

    cpu          MemAvailable and the control group's limit, the smaller; of that a share. No Linux: half of all
    cuda, npu    what mem_get_info says is free, of that a share; never more than the run's own device has

    needed       ends (embedding, head) + layers * (weights of a layer + its KV) + what a step holds for a while
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from hbmtwin.kernels.attention.interface import Backend

SHARE = {"cpu": 0.8, "cuda": 0.9, "npu": 0.9}
"""Of what is free: a CPU's other programs grow, too."""
GIB = 1 << 30
_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


class Room(NamedTuple):
    """What may be taken."""

    bytes: int
    said: str
    """Of which free bytes it is which share."""


class Need(NamedTuple):
    """What a decoder of that model takes, in bytes."""

    ends: int
    layer: int
    """Its weights and its KV of the largest step."""
    step: int
    """Activations, and copies that attention makes, of the largest step."""

    def of(self, num_layers: int) -> int:
        """In all."""
        return self.ends + num_layers * self.layer + self.step


def layers_that_fit(need: Need, room: Room, num_layers: int) -> int:
    """At most *num_layers*; below 1 where not even one does."""
    left = room.bytes - need.ends - need.step
    return min(num_layers, left // need.layer) if left >= 0 else 0


def room_of(torch: Any, backend: Backend, cap_bytes: int | None = None) -> Room:
    """What a decoder may take on that backend; *cap_bytes* is the most that the user allows."""
    if backend == "cpu":
        free, what = free_host_bytes(), "memory"
    else:
        free, what = int(getattr(torch, backend).mem_get_info()[0]), "the device"
    share = int(free * SHARE[backend])
    said = f"{gib(free)} of {what} are free, of which {SHARE[backend]:.0%} may be taken"
    if cap_bytes is not None and cap_bytes < share:
        return Room(cap_bytes, f"{said}, and the run's device.memory_bytes are {gib(cap_bytes)}")
    return Room(share, said)


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), groups: tuple[tuple[Path, Path], ...] = _GROUPS) -> int:
    """Of this machine, or of the control group that this process is in; where neither is told (no Linux), half of what
    the machine has."""
    found = []
    lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines() if meminfo.exists() else []
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            found.append(int(rest.split()[0]) * 1024)
    for limit, used in groups:
        try:
            most = limit.read_text(encoding="ascii").strip()
            if most.isdigit():
                found.append(max(0, int(most) - int(used.read_text(encoding="ascii"))))
        except (OSError, ValueError):
            continue
    return min(found) if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def gib(size: int) -> str:
    """``1.25 GiB``, small ones in MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
