"""The device backend: its worker run on the emulated driver as if that were an Ascend, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hbmtwin.allocators.caching import releases
from hbmtwin.validation.allocator import Case, validate
from hbmtwin.validation.configurations import configuration
from hbmtwin.validation.device import DeviceBackend, DeviceUnavailable, RecordedDriver
from hbmtwin.validation.emulated import EmulatorUnavailable, NpuSettings
from hbmtwin.validation.emulated.build import build_emulator
from hbmtwin.validation.emulated.records import ACTIONS, ENTRY
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20

AS_A_DEVICE = """
import ctypes
from hbmtwin.validation.emulated.build import build_emulator

driver, *_ = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in build_emulator().libraries]
driver.hbmtwin_set_cann(b"8.5.0")
driver.hbmtwin_set_capacity(ctypes.c_uint64(8 << 30), ctypes.c_uint64(2 << 20))
driver.hbmtwin_set_device(b"Ascend910B2", b"25.5.0")
driver.hbmtwin_set_tenants(ctypes.c_uint64(1 << 30))

from hbmtwin.validation.device_worker import main

main()
"""


@pytest.fixture(scope="module")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> DeviceBackend:
    try:
        build = build_emulator()
    except EmulatorUnavailable as reason:
        pytest.skip(str(reason))
    script = tmp_path_factory.mktemp("device") / "as_a_device.py"
    script.write_text(AS_A_DEVICE, encoding="utf-8")
    return DeviceBackend("npu", command=(sys.executable, "-P", str(script)), environment=build.environment())


def case(name: str, operations: int = 1200) -> Case:
    c = configuration(name)
    settings = NpuSettings(capacity_bytes=c.capacity_bytes, alloc_conf=c.alloc_conf, soc=c.soc, cann=c.cann)
    return Case(name, c.trace(operations), settings)


def test_it_says_what_it_found(ascend: DeviceBackend) -> None:
    assert ascend.against == "torch_npu 2.13.0 on Ascend910B2"
    assert ascend.about.total_bytes == 8 << 30


@pytest.mark.parametrize(
    "name",
    ["gc and max_split", "events and expandable", "fraction in mid-run"],
)
def test_no_difference_under_a_cap(ascend: DeviceBackend, name: str) -> None:
    report = validate([case(name)], ascend)
    assert {found.name: found.difference and found.difference.what for found in report.differing} == {}
    assert report.operations == 1200
    assert report.cases[0].ooms > 10


def test_a_planted_bug_is_caught(ascend: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "NPU_PAD", 0)
    (found,) = validate([case("default")], ascend).differing
    assert found.difference is not None
    assert found.difference.before_ours == found.difference.before_real


def test_what_a_device_cannot_do_is_skipped_with_the_reason(ascend: DeviceBackend) -> None:
    huge = Case("huge", [MemoryOp("malloc", 0, 512, 0)], NpuSettings(capacity_bytes=1 << 40))
    report = validate([case("workspace"), case("other memory"), case("no pad"), huge], ascend)
    assert report.cases == ()
    assert dict(report.skipped) == {
        "workspace": "a device cannot be told to use its workspace allocator",
        "other memory": "a device cannot be told what other processes hold",
        "no pad": "it is for Ascend950PR_9579",
        "huge": f"the device has {8 << 30} bytes, fewer than {1 << 40}",
    }


def test_without_a_device_it_says_what_helps() -> None:
    with pytest.raises(DeviceUnavailable, match=r"; --backend emulated needs no device"):
        DeviceBackend("cuda")


def test_a_release_that_is_not_modelled_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "about = {'version': '2.4.0', 'device': 'H100', 'total_bytes': 80 << 30, 'cann': ''}\n"
        "(pathlib.Path(sys.argv[2]) / 'about.json').write_text(json.dumps(about))\n",
        encoding="utf-8",
    )
    with pytest.raises(DeviceUnavailable, match=r"release '2.4.0' of torch_cuda is not modelled; there are 2.11.0"):
        DeviceBackend("cuda", command=(sys.executable, str(script)))


def test_a_driver_gives_the_addresses_of_the_real_one() -> None:
    alloc, mapped = ACTIONS.index("segment_alloc"), ACTIONS.index("segment_map")
    rows = [
        (0, alloc, 5 * MIB, 2 * MIB, 0, 0),
        (1, mapped, 64 * MIB, 4 * MIB, 0, 0),
        (2, alloc, 1 * MIB, 2 * MIB, 0, 0),
    ]
    driver = RecordedDriver(100 * MIB, np.array(rows, ENTRY))
    assert driver.alloc(2 * MIB) == 5 * MIB
    start = driver.reserve(40 * MIB)
    assert start == 64 * MIB
    page = driver.create(2 * MIB)
    assert page is not None
    driver.map(start, page)
    assert driver.alloc(2 * MIB) == 1 * MIB
    assert driver.alloc(2 * MIB) == 1 << 46
    driver.free(5 * MIB)
    assert driver.used_bytes == 6 * MIB
