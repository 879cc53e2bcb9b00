"""A model of the hardware's runtime: it gives out addresses and physical memory, and refuses when full.

One address space, far larger than the memory behind it, holds both kinds of ranges::

    FIRST_ADDRESS                                                                        2^48
    | alloc: range + memory | gap | reserve: range only [page mapped][page] | gap ... to the end |

Memory and addresses are separate things. Pages may lie anywhere physically, so whether a request succeeds depends on
the **free bytes alone** (there is no fragmentation at this level); where it comes to lie is first fit over the gaps.
What the driver really does about addresses is unknown (neither CANN nor CUDA documents it), and ties of a best-fit
allocator above go by address: the emulated driver that the model is compared with must use the same policy.

Complexity: ``alloc`` and ``reserve`` O(gaps), ``free`` and the page calls O(log n) and a move of the list of pages in
one range, ``mem_info`` O(1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import pairwise

MIB = 1 << 20
FIRST_ADDRESS = 2 * MIB
"""Any address but 0, which is null."""
END_ADDRESS = 1 << 48
ALLOC_UNIT = 512
"""``alloc`` rounds up to this. CANN documents 32 bytes, at starts aligned to 64; 512 is the unit of torch's allocators
and a multiple of both. That huge pages are 2 MiB is left out: torch_npu asks for whole multiples of 2 MiB, and CANN
falls back to small pages when huge ones run out."""
PAGE_UNIT = 2 * MIB
"""Granularity of physical memory behind virtual ranges, unless a driver is made with another.

CANN: ``aclrtMallocPhysical`` gives huge pages of 2 MiB whatever type is asked for (8.0), and since 8.1 also of 1 GiB.
CUDA: ``cuMemCreate`` takes multiples of ``cuMemGetAllocationGranularity``, 2 MiB or more in NVIDIA's own drivers;
vAttention's modified one gives 64, 128 and 256 KiB (github.com/microsoft/vattention, nvidia-vattn-uvm-driver)."""


class HbmDriver:
    """The memory of one device behind its runtime (``aclrtMalloc``, ``cudaMalloc``, and the virtual memory calls).

    *tenants_bytes* is what other processes hold. Bytes that this process keeps for good (context, collectives' buffers)
    are ordinary allocations. *page_bytes* is the granularity of :meth:`create`.
    """

    def __init__(self, capacity_bytes: int, *, tenants_bytes: int = 0, page_bytes: int = PAGE_UNIT) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, not {capacity_bytes}")
        if page_bytes < 1 or page_bytes % ALLOC_UNIT:
            raise ValueError(f"page_bytes must be a multiple of {ALLOC_UNIT}, not {page_bytes}; drivers give 2 MiB")
        self.capacity_bytes = capacity_bytes
        self.page_bytes = page_bytes
        self.tenants_bytes = 0
        self.num_alloc = 0
        """Successful calls of alloc and create."""
        self.num_free = 0
        """Calls of free and destroy."""
        self.peak_used_bytes = 0
        """The most that this process ever held."""
        self._used_bytes = 0
        # Gaps of the address space in address order; the last one reaches to its end and is never used up.
        self._gap_starts = [FIRST_ADDRESS]
        self._gap_sizes = [END_ADDRESS - FIRST_ADDRESS]
        self._allocated: dict[int, int] = {}
        self._reserved: dict[int, int] = {}
        self._reserved_starts: list[int] = []
        self._pages: dict[int, int] = {}
        # Mapped pages both ways, and their addresses in order, by the range that they lie in: one list for all would
        # be moved with each page, and a device of small pages has a million.
        self._mapped: dict[int, int] = {}
        self._mapped_at: dict[int, int] = {}
        self._mapped_starts: dict[int, list[int]] = {}
        self._next_page = 0
        self.set_tenants(tenants_bytes)

    # -- memory with an address ------------------------------------------------------------------------------------

    def alloc(self, size: int) -> int | None:
        """Return the address of *size* bytes, rounded up to 512, or None when fewer are free."""
        size = _whole(size, ALLOC_UNIT)
        if size > self.mem_info()[0]:
            return None
        self._used_bytes += size
        self.peak_used_bytes = max(self.peak_used_bytes, self._used_bytes)
        self.num_alloc += 1
        addr = self._take_range(size)
        self._allocated[addr] = size
        return addr

    def free(self, addr: int) -> None:
        """Give a range of :meth:`alloc` back. Raise KeyError if *addr* is none."""
        size = self._allocated.pop(addr)
        self._used_bytes -= size
        self.num_free += 1
        self._give_range(addr, size)

    # -- ranges without memory -------------------------------------------------------------------------------------

    def reserve(self, size: int) -> int:
        """Return the address of a new virtual range without memory. Costs no bytes."""
        size = _whole(size, ALLOC_UNIT)
        addr = self._take_range(size)
        self._reserved[addr] = size
        self._mapped_starts[addr] = []
        insort(self._reserved_starts, addr)
        return addr

    def release_range(self, addr: int) -> None:
        """Give a virtual range back. Raise KeyError if *addr* is none, ValueError while pages are mapped in it."""
        size = self._reserved[addr]
        if self._mapped_starts[addr]:
            raise ValueError(f"range {addr:#x} still has mapped pages; unmap them first")
        del self._reserved[addr], self._mapped_starts[addr]
        self._reserved_starts.remove(addr)
        self._give_range(addr, size)

    # -- memory without an address ---------------------------------------------------------------------------------

    def create(self, size: int) -> int | None:
        """Return a handle of *size* bytes of physical memory, or None when fewer are free.

        Raise ValueError unless *size* is a multiple of ``page_bytes``.
        """
        if size < 1 or size % self.page_bytes:
            raise ValueError(f"physical memory comes in multiples of {self.page_bytes} bytes, not {size}")
        if size > self.mem_info()[0]:
            return None
        self._used_bytes += size
        self.peak_used_bytes = max(self.peak_used_bytes, self._used_bytes)
        self.num_alloc += 1
        page = self._next_page
        self._next_page += 1
        self._pages[page] = size
        return page

    def destroy(self, page: int) -> None:
        """Give physical memory back. Raise KeyError if *page* is none, ValueError while it is mapped."""
        size = self._pages[page]
        if page in self._mapped_at:
            raise ValueError(f"page {page} is mapped at {self._mapped_at[page]:#x}; unmap it first")
        del self._pages[page]
        self._used_bytes -= size
        self.num_free += 1

    def map(self, addr: int, page: int) -> None:
        """Put physical memory behind *addr*.

        Raise KeyError if *page* is none, ValueError if it is mapped already, or if the place is not free inside one
        reserved range.
        """
        size = self._pages[page]
        if page in self._mapped_at:
            raise ValueError(f"page {page} is mapped at {self._mapped_at[page]:#x} already")
        start = self._range_of(addr)
        if start is None or addr + size > start + self._reserved[start]:
            raise ValueError(f"{addr:#x} + {size} bytes lies in no reserved range")
        starts = self._mapped_starts[start]
        i = bisect_left(starts, addr + size)
        if i and starts[i - 1] + self._pages[self._mapped[starts[i - 1]]] > addr:
            raise ValueError(f"{addr:#x} + {size} bytes has memory already")
        self._mapped[addr] = page
        self._mapped_at[page] = addr
        insort(starts, addr)

    def unmap(self, addr: int) -> int:
        """Undo :meth:`map`; return the page's handle. Raise KeyError if nothing is mapped at *addr*."""
        page = self._mapped.pop(addr)
        del self._mapped_at[page]
        start = self._range_of(addr)
        assert start is not None, "pages are mapped in ranges only"
        starts = self._mapped_starts[start]
        del starts[bisect_left(starts, addr)]
        return page

    def _range_of(self, addr: int) -> int | None:
        """Start of the last range that begins at *addr* or below."""
        i = bisect_right(self._reserved_starts, addr)
        return self._reserved_starts[i - 1] if i else None

    # -- what is left ----------------------------------------------------------------------------------------------

    def mem_info(self) -> tuple[int, int]:
        """Return ``(free, total)`` bytes, as ``aclrtGetMemInfo`` and ``cudaMemGetInfo`` do."""
        return max(0, self.capacity_bytes - self.tenants_bytes - self._used_bytes), self.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that this process holds."""
        return self._used_bytes

    def set_tenants(self, held_bytes: int) -> None:
        """Say how many bytes other processes hold from now on; more than is free makes free read 0."""
        if held_bytes < 0:
            raise ValueError(f"other processes cannot hold {held_bytes} bytes")
        self.tenants_bytes = held_bytes

    def check(self) -> None:
        """Assert all invariants. O(n log n)."""
        ranges = sorted(
            [*self._allocated.items(), *self._reserved.items(), *zip(self._gap_starts, self._gap_sizes, strict=True)]
        )
        at = FIRST_ADDRESS
        for start, size in ranges:
            assert start == at, f"hole or overlap at {at:#x}"
            assert size > 0, f"empty range at {start:#x}"
            at += size
        assert at == END_ADDRESS, "ranges and gaps tile the address space"
        assert self._gap_starts == sorted(self._gap_starts), "gaps are in address order"
        gaps = list(zip(self._gap_starts, self._gap_sizes, strict=True))
        assert all(a + n < b for (a, n), (b, _) in pairwise(gaps)), "neighbouring gaps are merged"
        assert self._used_bytes == sum(self._allocated.values()) + sum(self._pages.values()), "bytes in use"
        assert self.peak_used_bytes >= self._used_bytes, "peak"
        assert {page: at for at, page in self._mapped.items()} == self._mapped_at, "maps agree"
        assert self._reserved_starts == sorted(self._reserved) == sorted(self._mapped_starts), "reserved addresses"
        mapped = [addr for start in self._reserved_starts for addr in self._mapped_starts[start]]
        assert mapped == sorted(self._mapped), "mapped addresses are in order"

    def _take_range(self, size: int) -> int:
        """First fit: the lowest gap that is large enough."""
        for i, gap in enumerate(self._gap_sizes):
            if gap >= size:
                addr = self._gap_starts[i]
                if gap == size:
                    del self._gap_starts[i], self._gap_sizes[i]
                else:
                    self._gap_starts[i] = addr + size
                    self._gap_sizes[i] = gap - size
                return addr
        raise ValueError(f"no range of {size} bytes is left in the address space")

    def _give_range(self, addr: int, size: int) -> None:
        starts, sizes = self._gap_starts, self._gap_sizes
        i = bisect_left(starts, addr)
        if i < len(starts) and starts[i] == addr + size:
            size += sizes[i]
            del starts[i], sizes[i]
        if i and starts[i - 1] + sizes[i - 1] == addr:
            sizes[i - 1] += size
        else:
            starts.insert(i, addr)
            sizes.insert(i, size)


def _whole(size: int, unit: int) -> int:
    if size < 1:
        raise ValueError(f"a driver cannot serve {size} bytes")
    return -(-size // unit) * unit
