"""The configurations that the caching allocator is compared under: settings, each with the traffic that is hard on it.

Same name and seed, same trace, as :mod:`hbmtwin.validation.traffic` makes it.
"""

from __future__ import annotations

from typing import Final

from hbmtwin.validation.traffic import GIB, KIB, MIB, THRESHOLDS, Configuration, Traffic

_WHOLE = tuple(range(10 * MIB, 48 * MIB, 2 * MIB))
"""Requests of about these sizes leave nothing over: unsplit free segments, which garbage collection looks at."""
_EVENTS = {"record_stream": 200, "event_complete": 120, "synchronize": 4, "empty_cache": 2}
_ERASED = {**_EVENTS, "erase_stream": 40}
_POOLS = {"pools": 25, "empty_cache": 4}
_EXPANDABLE = "expandable_segments:True"
_BIG = (*THRESHOLDS, 100 * MIB, 512 * MIB, 1 * GIB)


def _near(*mib: int) -> tuple[int, ...]:
    return (*THRESHOLDS, *(m * MIB for m in mib))


CONFIGURATIONS: Final = (
    Configuration("default"),
    Configuration("tiny device", capacity_bytes=64 * MIB),
    Configuration("three streams", traffic=Traffic(streams=3)),
    Configuration("empty_cache often", traffic=Traffic(weights={"empty_cache": 40})),
    Configuration("no pad", soc="Ascend950PR_9579", cann="9.1.0"),
    Configuration("max_split", "max_split_size_mb:40", Traffic(thresholds=_near(40))),
    Configuration("max_split, least", "max_split_size_mb:20"),
    Configuration(
        "max_split and tolerance",
        "max_split_size_mb:30,max_non_split_rounding_mb:50",
        Traffic(thresholds=_near(30, 50)),
    ),
    Configuration("max_split, three streams", "max_split_size_mb:25", Traffic(streams=3, thresholds=_near(25))),
    Configuration("roundup", "roundup_power2_divisions:4"),
    Configuration("roundup by size", "roundup_power2_divisions:[1:8,4:2,16:4,>:1]"),
    Configuration(
        "roundup and max_split", "roundup_power2_divisions:8,max_split_size_mb:32", Traffic(thresholds=_near(32))
    ),
    Configuration("large segment", "large_segment_size_mb:64", Traffic(thresholds=_near(64))),
    Configuration("large segment, least", "large_segment_size_mb:11", Traffic(thresholds=_near(11))),
    Configuration(
        "large segment and max_split",
        "large_segment_size_mb:33,max_split_size_mb:36,max_non_split_rounding_mb:40",
        Traffic(thresholds=_near(33, 36)),
    ),
    Configuration(
        "gc and fraction",
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.75",
        Traffic(thresholds=_WHOLE),
        capacity_bytes=1 * GIB,
    ),
    Configuration(
        "gc and fraction, three streams",
        "garbage_collection_threshold:0.7,per_process_memory_fraction:0.9",
        Traffic(streams=3, thresholds=_WHOLE),
        capacity_bytes=2 * GIB,
    ),
    Configuration("gc without a cap", "garbage_collection_threshold:0.4"),
    Configuration(
        "gc and max_split",
        "garbage_collection_threshold:0.6,max_split_size_mb:25,per_process_memory_fraction:0.8",
        Traffic(thresholds=_near(25)),
    ),
    Configuration("fraction", "per_process_memory_fraction:0.5", Traffic(greed=20, pressure=0.6)),
    Configuration("preemptive refusal", "throw_on_npumalloc_oom:True"),
    Configuration("preemptive refusal and fraction", "throw_on_npumalloc_oom:True,per_process_memory_fraction:0.8"),
    Configuration("expandable", _EXPANDABLE),
    Configuration("expandable, three streams", _EXPANDABLE, Traffic(streams=3)),
    Configuration("expandable, not aligned", f"{_EXPANDABLE},base_addr_aligned_kb:0"),
    Configuration("expandable, aligned to 4 KiB", f"{_EXPANDABLE},base_addr_aligned_kb:4"),
    Configuration("expandable and segment_size", f"{_EXPANDABLE},segment_size_mb:64", Traffic(thresholds=_near(64))),
    Configuration("expandable and large segment", f"{_EXPANDABLE},large_segment_size_mb:32"),
    Configuration("expandable and roundup", f"{_EXPANDABLE},roundup_power2_divisions:4"),
    Configuration("expandable and fraction", f"{_EXPANDABLE},per_process_memory_fraction:0.7"),
    Configuration(
        "expandable, pages kept", _EXPANDABLE, Traffic(weights={"empty_virt_addr_cache": 20, "empty_cache": 5})
    ),
    Configuration("pages of 1 GiB", "page_size:1g", Traffic(thresholds=_BIG), capacity_bytes=9 * GIB),
    Configuration(
        "expandable pages of 1 GiB", f"page_size:1g,{_EXPANDABLE}", Traffic(thresholds=_BIG), capacity_bytes=9 * GIB
    ),
    Configuration("events", traffic=Traffic(streams=2, weights=_EVENTS)),
    Configuration("events on three streams", traffic=Traffic(streams=3, weights=_ERASED)),
    Configuration("events on twelve streams", traffic=Traffic(streams=12, weights=_ERASED), capacity_bytes=1 * GIB),
    Configuration("events and expandable", _EXPANDABLE, Traffic(streams=3, weights=_ERASED)),
    Configuration(
        "events, max_split and gc",
        "max_split_size_mb:32,garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        Traffic(streams=3, weights=_EVENTS, thresholds=_near(32)),
    ),
    Configuration("lazy reclaim", "multi_stream_lazy_reclaim:True", Traffic(streams=3, weights=_ERASED)),
    Configuration(
        "lazy reclaim, many events",
        "multi_stream_lazy_reclaim:True",
        Traffic(streams=3, weights={"record_stream": 330, "event_complete": 4}, thresholds=(512, 4 * KIB, 64 * KIB)),
    ),
    Configuration(
        "lazy reclaim and expandable",
        f"multi_stream_lazy_reclaim:True,{_EXPANDABLE}",
        Traffic(streams=3, weights=_EVENTS),
    ),
    Configuration("pools", traffic=Traffic(greed=0, weights=_POOLS)),
    Configuration(
        "pools with options",
        traffic=Traffic(greed=0, pressure=0.9, weights=_POOLS, pool_flags=("", "use_on_oom", "no_split")),
    ),
    Configuration(
        "pools and events",
        traffic=Traffic(
            streams=3, greed=15, weights={**_ERASED, **_POOLS}, pool_flags=("", "use_on_oom", "use_on_oom|no_split")
        ),
    ),
    Configuration(
        "pools, max_split and gc",
        "max_split_size_mb:32,garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        Traffic(greed=0, pressure=0.8, weights=_POOLS, pool_flags=("", "use_on_oom", "no_split"), thresholds=_near(32)),
    ),
    Configuration(
        "pools and expandable", _EXPANDABLE, Traffic(greed=0, pressure=0.9, weights=_POOLS, dead_pools_only=True)
    ),
    Configuration("workspace", traffic=Traffic(streams=2, weights={"workspace": 60, "empty_cache": 4})),
    Configuration(
        "workspace and expandable",
        _EXPANDABLE,
        Traffic(streams=2, weights={"workspace": 60, "empty_cache": 4, "empty_virt_addr_cache": 8}),
    ),
    Configuration("other memory", traffic=Traffic(weights={"other_memory": 15, "empty_cache": 2})),
    Configuration("resets", traffic=Traffic(weights={"reset_peak": 10, "reset_accumulated": 10, "empty_cache": 2})),
    Configuration(
        "settings in mid-run",
        traffic=Traffic(
            weights={"set_conf": 12, "empty_cache": 2},
            texts=(
                _EXPANDABLE,
                _EXPANDABLE,
                "expandable_segments:False",
                "throw_on_npumalloc_oom:True",
                "throw_on_npumalloc_oom:False,per_process_memory_fraction:0.8",
                "release_lock_on_npumalloc:True",
                "per_process_memory_fraction:2",
                "expandable_segments:maybe",
                "garbage_collection_threshold:0.5",
                "",
            ),
        ),
    ),
    Configuration(
        "max_split raised in mid-run",
        "max_split_size_mb:20,garbage_collection_threshold:0.5,roundup_power2_divisions:4,per_process_memory_fraction:0.9",
        Traffic(weights={"set_conf": 1, "empty_cache": 2}, texts=("release_lock_on_npumalloc:True",)),
    ),
    Configuration(
        "fraction in mid-run",
        "garbage_collection_threshold:0.5",
        Traffic(weights={"set_fraction": 8, "empty_cache": 2, "reset_peak": 2, "reset_accumulated": 2}),
    ),
    Configuration(
        "everything",
        "max_split_size_mb:32,garbage_collection_threshold:0.5,roundup_power2_divisions:[4:2,16:4]",
        Traffic(
            streams=3,
            greed=0,
            pressure=0.8,
            weights={
                **_ERASED,
                **_POOLS,
                "workspace": 20,
                "set_fraction": 4,
                "other_memory": 4,
                "reset_peak": 2,
                "reset_accumulated": 2,
            },
            pool_flags=("", "use_on_oom", "no_split"),
            thresholds=_near(32),
        ),
    ),
    Configuration(
        "everything expandable",
        f"{_EXPANDABLE},multi_stream_lazy_reclaim:True,segment_size_mb:32",
        Traffic(
            streams=3,
            weights={
                **_ERASED,
                "workspace": 20,
                "set_fraction": 4,
                "other_memory": 4,
                "empty_virt_addr_cache": 4,
                "reset_peak": 2,
                "reset_accumulated": 2,
            },
        ),
    ),
    Configuration("kv, concat", growth="exact"),
    Configuration("kv, doubling", growth="doubling"),
    Configuration("kv, steps", growth="step", capacity_bytes=1 * GIB),
    Configuration("kv, static", growth="static", capacity_bytes=1 * GIB),
    Configuration("kv, concat, expandable", _EXPANDABLE, growth="exact"),
    Configuration("kv, concat, max_split", "max_split_size_mb:20", growth="exact"),
)


def configuration(name: str) -> Configuration:
    """The one of that name. Raise KeyError."""
    return {c.name: c for c in CONFIGURATIONS}[name]
