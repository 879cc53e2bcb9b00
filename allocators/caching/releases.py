"""What differs between flavours, releases and devices: one record of constants and switches.

A release is the version of the package, ``torch_npu`` or ``torch``. Sources: the tags v6.0.0 to v26.2.0 of torch_npu,
``CUDACachingAllocator.cpp`` of PyTorch 2.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hbmtwin.allocators.caching.conf import PINNED_LIMITS
from hbmtwin.allocators.caching.sizes import NPU_PAD, Flavour
from hbmtwin.allocators.stats import DEVICE_COUNTERS

DEFAULT_RELEASE: Final[dict[Flavour, str]] = {"torch_npu": "2.13.0", "torch_cuda": "2.11.0"}

# Package of torch_npu -> product version and PyTorch version that it is built of.
_NPU_PACKAGES: Final[dict[str, tuple[tuple[int, int], tuple[int, int]]]] = {
    "2.5.1": ((7, 0), (2, 5)),
    "2.5.1.post1": ((7, 1), (2, 5)),
    "2.7.1": ((7, 2), (2, 7)),
    "2.7.1.post2": ((7, 3), (2, 7)),
    "2.9.0": ((7, 3), (2, 9)),
    "2.9.0.post2": ((26, 0), (2, 9)),
    "2.9.0.post6": ((26, 1), (2, 9)),
    "2.10.0.post4": ((26, 1), (2, 10)),
    "2.11.0": ((26, 1), (2, 11)),
    "2.12.0": ((26, 1), (2, 12)),
    "2.13.0": ((26, 2), (2, 13)),
}
_CUDA_RELEASES: Final = ("2.11.0",)


@dataclass(frozen=True, slots=True)
class ReleaseRules:
    """The rules of one flavour and release on one device."""

    flavour: Flavour
    pad: int
    """Bytes added to a request before rounding."""
    own_stream_counts: bool
    """``record_stream`` of the stream that a block was allocated on defers its free."""
    aligns_addresses: bool
    """Blocks of expandable segments are cut to ``base_addr_aligned_kb``."""
    synchronizes_device: bool
    """The whole device is stopped before memory is released or unmapped; CUDA waits for single streams."""
    fraction_of_1_is_no_cap: bool
    """``set_per_process_memory_fraction(1)`` takes the cap away; before, it set one of the whole device."""
    oversize_tolerance_is_fixed: bool
    """An oversize request takes a block less than 20 MiB larger, whatever the large segment size."""
    scope_is_capture: bool
    """While a pool's scope is entered no event is queried and nothing is released, as in a graph capture."""
    pool_options: bool
    """A pool can be made with ``use_on_oom`` and ``no_split``."""
    keeps_pages: bool
    """``empty_virt_addr_cache`` exists."""
    closing_blank: bool
    """The message of a failure has a blank where later ones have a full stop."""
    absent_statistics: frozenset[str]
    absent_keys: frozenset[str]
    """Settings that this release does not know."""
    split_size_exclusive: bool
    """``max_split_size_mb`` must be larger than 20, not 20."""
    page_size_1g_supported: bool


def release_rules(flavour: Flavour, release: str | None, soc: str, cann: str) -> ReleaseRules:
    """The rules of a release (None: the one modelled byte for byte). Raise ValueError for one that is not known."""
    release = release or DEFAULT_RELEASE[flavour]
    known: tuple[str, ...] = tuple(_NPU_PACKAGES) if flavour == "torch_npu" else _CUDA_RELEASES
    if release not in known:
        raise ValueError(f"release {release!r} of {flavour} is not modelled; there are {', '.join(known)}")
    if flavour == "torch_npu":
        return _npu_rules(*_NPU_PACKAGES[release], soc, cann)
    return ReleaseRules(
        flavour=flavour,
        pad=0,
        own_stream_counts=False,
        aligns_addresses=False,
        synchronizes_device=False,
        fraction_of_1_is_no_cap=True,
        oversize_tolerance_is_fixed=False,
        scope_is_capture=True,
        pool_options=True,
        keeps_pages=False,
        closing_blank=False,
        absent_statistics=frozenset({"num_oom_rejections"}),
        absent_keys=frozenset({"throw_on_cudamalloc_oom", *PINNED_LIMITS}),
        split_size_exclusive=False,
        page_size_1g_supported=False,
    )


def _npu_rules(product: tuple[int, int], torch: tuple[int, int], soc: str, cann: str) -> ReleaseRules:
    newest = product >= (26, 2) and torch >= (2, 13)
    shared_parser = product >= (26, 1) and torch >= (2, 11)
    no_pad = product >= (26, 1) and soc.startswith("Ascend950") and _version(cann) >= (9, 1)
    absent: set[str] = set()
    for since, keys in (
        (product >= (7, 3), ("segment_size_mb", "roundup_power2_divisions", "pin_memory_expandable_segments")),
        (
            product >= (26, 0),
            ("multi_stream_lazy_reclaim", "pinned_mem_register", "pinned_reserve_segment_size_mb"),
        ),
        (product >= (26, 1) and torch >= (2, 10), ("per_process_memory_fraction",)),
        (shared_parser, ("large_segment_size_mb", "max_non_split_rounding_mb")),
        (product >= (26, 2), ("release_lock_on_npumalloc",)),
        (newest, ("throw_on_npumalloc_oom", *PINNED_LIMITS)),
    ):
        if not since:
            absent.update(keys)
    return ReleaseRules(
        flavour="torch_npu",
        pad=0 if no_pad else NPU_PAD,
        own_stream_counts=True,
        aligns_addresses=True,
        synchronizes_device=True,
        fraction_of_1_is_no_cap=shared_parser,
        oversize_tolerance_is_fixed=product < (7, 3),
        scope_is_capture=torch < (2, 13),
        pool_options=newest,
        keeps_pages=product >= (7, 2),
        closing_blank=product < (26, 0),
        absent_statistics=frozenset() if newest else frozenset({"num_oom_rejections", *DEVICE_COUNTERS}),
        absent_keys=frozenset(absent),
        split_size_exclusive=not shared_parser,
        page_size_1g_supported=_version(cann) >= (8, 1),
    )


def _version(text: str) -> tuple[int, ...]:
    """``8.1.RC1`` is (8, 1). Raise ValueError where there is none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no CANN version; write 8.5.0 or 8.1.RC1")
    return int(match[1]), int(match[2])
