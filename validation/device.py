"""The real allocator on a real device, Ascend or CUDA: what it did first, then ours over the addresses that it got.

A device cannot be told how large it is, when an event completes, or what other processes hold. So both sides are capped
by memory fraction, every event counts as complete after the operation that recorded it, and traces that need the rest
are refused by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from hbmtwin.allocators.caching import AllocatorConf, CachingConfig, ConfError
from hbmtwin.allocators.caching.sizes import Flavour
from hbmtwin.allocators.driver import PAGE_UNIT, HbmDriver
from hbmtwin.validation.device_worker import ABOUT, NOTES, RUN
from hbmtwin.validation.emulated import Crash, NpuSettings, RealError, RealRun
from hbmtwin.validation.emulated.job import Job
from hbmtwin.validation.emulated.records import ACTIONS, Table
from hbmtwin.validation.simulated import simulate
from hbmtwin.workloads.formats.memory_trace import MemoryOp

DeviceKind = Literal["npu", "cuda"]
WORKER = (sys.executable, "-P", "-m", "hbmtwin.validation.device_worker")
UNTELLABLE = {
    "other_memory": "what other processes hold",
    "workspace": "to use its workspace allocator",
}
NPU_ONLY = ("erase_stream", "empty_virt_addr_cache")
_VARIABLES: dict[DeviceKind, str] = {"npu": "PYTORCH_NPU_ALLOC_CONF", "cuda": "PYTORCH_CUDA_ALLOC_CONF"}
_OTHERS = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", *_VARIABLES.values())
_SPARE = 1 << 46
"""Addresses for what the real one did not ask of its driver: any that it never gets, so that the difference shows."""


class DeviceUnavailable(Exception):
    """There is no such device, or its release is not modelled; the text says what helps."""


@dataclass(frozen=True, slots=True)
class About:
    """What the worker found."""

    version: str
    device: str
    total_bytes: int
    cann: str


class DeviceBackend:
    """A real device. Raise DeviceUnavailable where there is none, or where its release is not modelled.

    *command* starts the worker; its default is this Python.
    """

    same_driver = False

    def __init__(
        self, kind: DeviceKind, *, command: Sequence[str] = WORKER, environment: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.flavour: Flavour = "torch_npu" if kind == "npu" else "torch_cuda"
        self._command = command
        self._environment = environment or {}
        with tempfile.TemporaryDirectory(prefix="hbmtwin-device-") as folder:
            self.work(Path(folder), "")
            about = json.loads((Path(folder) / ABOUT).read_text())
        if "unavailable" in about:
            raise DeviceUnavailable(f"{about['unavailable']}; --backend emulated needs no device")
        self.about = About(**about)
        self.settings = NpuSettings(soc=self.about.device, cann=self.about.cann) if kind == "npu" else NpuSettings()
        try:
            self._config()
        except ValueError as unknown:
            raise DeviceUnavailable(f"{unknown}; install one of these") from None
        self.against = f"{self.flavour} {self.about.version} on {self.about.device}"

    def refuses(self, case_ops: Iterable[MemoryOp], settings: NpuSettings) -> str:
        """Why a trace cannot be run here; empty if it can."""
        used = {op.op for op in case_ops}
        for op, what in UNTELLABLE.items():
            if op in used:
                return f"a device cannot be told {what}"
        for op in NPU_ONLY if self.kind == "cuda" else ():
            if op in used:
                return f"CUDA has no {op}"
        if settings.soc != NpuSettings().soc:
            return f"it is for {settings.soc}"
        if settings.capacity_bytes > self.about.total_bytes:
            return f"the device has {self.about.total_bytes} bytes, fewer than {settings.capacity_bytes}"
        try:
            AllocatorConf(self.flavour).parse(settings.alloc_conf)
        except ConfError as refused:
            return str(refused)
        return ""

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        """Our run and the real one. The first operation that both do is the cap, left out of what is returned."""
        capped = self.capped(ops, settings)
        real = self._replay(capped, settings)
        if real.setup_error is not None:
            ours = simulate(capped, self._here(settings), flavour=self.flavour, release=self.about.version)
        else:
            driver = RecordedDriver(self.about.total_bytes, real.entries)
            ours = simulate(
                capped,
                self._here(settings),
                flavour=self.flavour,
                release=self.about.version,
                driver=driver,
                events_complete_at_once=True,
            )
        if (real.entries["pool"] < 0).any():  # this release does not say
            ours.entries["pool"] = real.entries["pool"] = 0
        return _without_first(ours), _without_first(real)

    def capped(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> list[MemoryOp]:
        """The operations behind one that makes the device as small as *settings* say."""
        share = settings.capacity_bytes / self.about.total_bytes
        return [MemoryOp("set_fraction", arg=repr(share)), *(_scaled(op, share) for op in ops)]

    def _here(self, settings: NpuSettings) -> NpuSettings:
        return replace(self.settings, alloc_conf=settings.alloc_conf)

    def _config(self) -> None:
        """Raise ValueError for a release that is not modelled."""
        CachingConfig(flavour=self.flavour, release=self.about.version, soc=self.settings.soc, cann=self.settings.cann)

    def _replay(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        with tempfile.TemporaryDirectory(prefix="hbmtwin-device-") as name:
            folder = Path(name)
            Job("replay", settings, [(op.op, op.id, op.size, op.stream, op.arg) for op in ops]).write(folder)
            said = self.work(folder, settings.alloc_conf)
            if not (folder / NOTES).exists():
                return RealRun(crash=Crash(-1, 0, said))
            notes = json.loads((folder / NOTES).read_text())
            if "setup_error" in notes:
                return RealRun(setup_error=RealError(*notes["setup_error"]))
            tables = dict(np.load(folder / RUN))
            stats = tables.pop("stats")
            return RealRun(
                stat_names=tuple(notes["stat_names"]),
                initial_stats=stats[0],
                stats=stats[1:],
                errors={i: RealError(kind, text) for i, kind, text in notes["errors"]},
                **tables,
            )

    def work(self, folder: Path, alloc_conf: str, *, command: Sequence[str] = ()) -> str:
        """Run the worker, or *command* in its place; return the last it printed. Raise DeviceUnavailable."""
        environment = {name: text for name, text in os.environ.items() if name not in _OTHERS} | dict(self._environment)
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        if self.kind == "npu":
            environment["TASK_QUEUE_ENABLE"] = "0"  # else a queue thread decides when an event counts as recorded
        if alloc_conf:
            environment[_VARIABLES[self.kind]] = alloc_conf
        done = subprocess.run(
            [*(command or self._command), self.kind, str(folder)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not (folder / ABOUT).exists():
            raise DeviceUnavailable(f"the worker died: {done.stderr.strip()[-2000:]}")
        return done.stderr[-2000:]


class RecordedDriver(HbmDriver):
    """A driver that gives the addresses which a real one gave, in the order in which it gave them."""

    def __init__(self, capacity_bytes: int, entries: Table) -> None:
        super().__init__(capacity_bytes)
        self._segments = deque(_addresses(entries, "segment_alloc"))
        self._maps = deque(_addresses(entries, "segment_map"))
        self._spare = _SPARE
        self._next = 0

    def alloc(self, size: int) -> int | None:
        """The next recorded segment's address."""
        self._next = self._unused(self._segments)
        address = super().alloc(size)
        if self._segments and address == self._segments[0]:
            self._segments.popleft()
        return address

    def reserve(self, size: int) -> int:
        """Where the next recorded mapping begins; a probe smaller than a page gets any address."""
        self._next = self._unused(self._maps) if size >= PAGE_UNIT else self._spare
        return super().reserve(size)

    def map(self, addr: int, page: int) -> None:
        """As any driver does; the recorded mapping that begins here is used up."""
        super().map(addr, page)
        if self._maps and self._maps[0] == addr:
            self._maps.popleft()

    def _unused(self, recorded: deque[int]) -> int:
        """The next recorded address; another where we have gone another way and hold it already."""
        if not recorded or recorded[0] in self._allocated or recorded[0] in self._reserved:
            return self._spare
        return recorded[0]

    def _take_range(self, size: int) -> int:
        if self._next == self._spare:
            self._spare += -(-size // PAGE_UNIT) * PAGE_UNIT
        return self._next

    def _give_range(self, addr: int, size: int) -> None:
        """The real driver decides what becomes of it."""


def _addresses(entries: Table, action: str) -> list[int]:
    found: list[int] = entries["address"][entries["action"] == ACTIONS.index(action)].tolist()
    return found


def _scaled(op: MemoryOp, share: float) -> MemoryOp:
    """The same share of the cap that stands for the whole device."""
    return op._replace(arg=repr(float(op.arg) * share)) if op.op == "set_fraction" else op


def _without_first(run: RealRun) -> RealRun:
    """The run from the second operation on."""
    if not len(run.results):
        return run
    moved = {name: getattr(run, name).copy() for name in ("entries", "segments", "blocks")}
    for table in moved.values():
        table["operation"] -= 1
    return replace(
        run,
        initial_stats=run.stats[0],
        stats=run.stats[1:],
        results=run.results[1:],
        errors={i - 1: error for i, error in run.errors.items()},
        **moved,
    )
