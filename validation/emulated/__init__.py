"""The real torch_npu wheel on an emulated driver: the ground truth that needs no device."""

from hbmtwin.validation.emulated.build import EmulatorUnavailable
from hbmtwin.validation.emulated.npu import EmulatedNpu
from hbmtwin.validation.emulated.process import WorkerDied
from hbmtwin.validation.emulated.records import Crash, NpuSettings, RawTiming, RealError, RealRun

__all__ = [
    "Crash",
    "EmulatedNpu",
    "EmulatorUnavailable",
    "NpuSettings",
    "RawTiming",
    "RealError",
    "RealRun",
    "WorkerDied",
]
