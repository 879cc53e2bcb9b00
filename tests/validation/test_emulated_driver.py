"""The emulated driver's memory is HbmDriver's: same addresses, same refusals, same bytes free."""

import ctypes
import random
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from hbmtwin.allocators.driver import MIB, HbmDriver
from hbmtwin.validation.emulated import EmulatorUnavailable
from hbmtwin.validation.emulated.build import build_emulator

CAPACITY = 256 * MIB
CALLS = ("alloc", "alloc", "free", "reserve", "release", "create", "destroy", "map", "unmap", "tenants")


class CDriver:
    """``memory.c`` by the verbs of HbmDriver; a copy of the library has state of its own."""

    def __init__(self, folder: Path) -> None:
        try:
            library = build_emulator().libraries[0]
        except EmulatorUnavailable as missing:
            pytest.skip(str(missing))
        self._lib = ctypes.CDLL(shutil.copy(library, folder / "driver.so"))
        self._lib.hbmtwin_set_capacity(ctypes.c_uint64(CAPACITY), ctypes.c_uint64(2 * MIB))

    def _new(self, call: str, size: int, *rest: object) -> int | None:
        made = ctypes.c_void_p()
        code = getattr(self._lib, call)(ctypes.byref(made), ctypes.c_size_t(size), *rest)
        assert code in (0, 207001)
        return made.value if code == 0 else None

    def alloc(self, size: int) -> int | None:
        return self._new("aclrtMallocAlign32", size, 0)

    def free(self, addr: int) -> None:
        assert self._lib.aclrtFree(ctypes.c_void_p(addr)) == 0

    def reserve(self, size: int) -> int:
        address = self._new("aclrtReserveMemAddress", size, ctypes.c_size_t(0), None, ctypes.c_uint64(1))
        assert address is not None
        return address

    def release_range(self, addr: int) -> None:
        assert self._lib.aclrtReleaseMemAddress(ctypes.c_void_p(addr)) == 0

    def create(self, size: int) -> int | None:
        handle = self._new("aclrtMallocPhysical", size, None, ctypes.c_uint64(0))
        return None if handle is None else handle - 1

    def destroy(self, page: int) -> None:
        assert self._lib.aclrtFreePhysical(ctypes.c_void_p(page + 1)) == 0

    def map_code(self, addr: int, size: int, page: int) -> int:
        handle, nothing = ctypes.c_void_p(page + 1), ctypes.c_uint64(0)
        return int(self._lib.aclrtMapMem(ctypes.c_void_p(addr), ctypes.c_size_t(size), nothing, handle, nothing))

    def unmap(self, addr: int) -> None:
        assert self._lib.aclrtUnmapMem(ctypes.c_void_p(addr)) == 0

    def mem_info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert self._lib.aclrtGetMemInfo(1, ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value

    def set_tenants(self, held_bytes: int) -> None:
        self._lib.hbmtwin_set_tenants(ctypes.c_uint64(held_bytes))


def without_pages(reserved: dict[int, int], mapped: Collection[int]) -> list[int]:
    return [start for start, size in reserved.items() if not any(start <= at < start + size for at in mapped)]


def first_difference(real: CDriver, ours: HbmDriver, steps: int) -> int | None:
    """Drive both at random; return the step after which they first disagree, None if they never do."""
    draw = random.Random(7)
    allocated: list[int] = []
    reserved: dict[int, int] = {}
    pages: dict[int, int] = {}
    places: dict[int, int] = {}
    for step in range(steps):
        what = draw.choice(CALLS)
        answers: list[object] = [None, None]
        if what == "alloc":
            size = draw.choice((1, 512, 513, 2 * MIB, draw.randrange(1, 40 * MIB)))
            answers = [driver.alloc(size) for driver in (real, ours)]
            if isinstance(answers[0], int):
                allocated.append(answers[0])
        elif what == "free" and allocated:
            address = allocated.pop(draw.randrange(len(allocated)))
            real.free(address)
            ours.free(address)
        elif what == "reserve":
            size = draw.randrange(1, 64 * MIB)
            answers = [driver.reserve(size) for driver in (real, ours)]
            if isinstance(answers[0], int):
                reserved[answers[0]] = size
        elif what == "release" and (idle := without_pages(reserved, places.values())):
            address = draw.choice(idle)
            del reserved[address]
            real.release_range(address)
            ours.release_range(address)
        elif what == "create":
            size = 2 * MIB * draw.randrange(1, 6)
            answers = [driver.create(size) for driver in (real, ours)]
            if isinstance(answers[0], int):
                pages[answers[0]] = size
        elif what == "destroy" and (loose := [page for page in pages if page not in places]):
            page = draw.choice(loose)
            del pages[page]
            real.destroy(page)
            ours.destroy(page)
        elif what == "map" and pages and reserved:
            page, start = draw.choice(list(pages)), draw.choice(list(reserved))
            at = start + 2 * MIB * draw.randrange(8)
            try:
                ours.map(at, page)
                answers[1] = 0
                places[page] = at
            except ValueError:
                answers[1] = 107000
            answers[0] = real.map_code(at, pages[page], page)
        elif what == "unmap" and places:
            page = draw.choice(list(places))
            at = places.pop(page)
            real.unmap(at)
            ours.unmap(at)
        elif what == "tenants":
            held = draw.choice((0, 0, 0, 100 * MIB, 300 * MIB))
            real.set_tenants(held)
            ours.set_tenants(held)
        if answers[0] != answers[1] or real.mem_info() != ours.mem_info():
            return step
    return None


def test_both_drivers_agree_on_20_000_random_calls(tmp_path: Path) -> None:
    assert first_difference(CDriver(tmp_path), HbmDriver(CAPACITY), 20_000) is None


def test_another_policy_is_noticed_at_once(tmp_path: Path) -> None:
    class BestFit(HbmDriver):
        def _take_range(self, size: int) -> int:
            """Planted bug: the smallest gap that is large enough, not the lowest."""
            gaps = sorted((gap, i) for i, gap in enumerate(self._gap_sizes) if gap >= size)
            i = gaps[0][1]
            addr = self._gap_starts[i]
            self._gap_starts[i] += size
            self._gap_sizes[i] -= size
            if not self._gap_sizes[i]:
                del self._gap_starts[i], self._gap_sizes[i]
            return addr

    step = first_difference(CDriver(tmp_path), BestFit(CAPACITY), 2_000)
    assert step is not None
    assert step < 200


def test_what_is_not_there_cannot_be_given_back(tmp_path: Path) -> None:
    driver = CDriver(tmp_path)
    lib = driver._lib
    address = driver.alloc(MIB)
    page = driver.create(2 * MIB)
    place = driver.reserve(4 * MIB)
    assert (address, page, place) == (2 * MIB, 0, 3 * MIB)
    assert driver.map_code(place, 2 * MIB, page) == 0
    for call in ("aclrtFree", "aclrtReleaseMemAddress", "aclrtUnmapMem", "aclrtFreePhysical"):
        assert getattr(lib, call)(ctypes.c_void_p(12345)) == 107000, call
    assert lib.aclrtFree(ctypes.c_void_p(place)) == 107000, "a reserved range is no memory"
    assert lib.aclrtReleaseMemAddress(ctypes.c_void_p(place)) == 107000, "a page is mapped in it"
    assert lib.aclrtFreePhysical(ctypes.c_void_p(page + 1)) == 107000, "it is mapped"
    assert driver.mem_info() == (253 * MIB, 256 * MIB)
