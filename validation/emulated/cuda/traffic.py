"""Traces and settings that are hard on the CUDA allocator: the generator of ``validation.traffic``, CUDA's own keys.

Unlike torch_npu, CUDA allows expandable segments together with a split size and with garbage collection. Streams' uses
inside a MemPool's scope are left out: torch 2.11 takes a scope for a capture and then records the events that it put
off in the order of a hash table of host pointers, which differs from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hbmtwin.validation.traffic import GIB, MIB, THRESHOLDS, Configuration, Traffic
from hbmtwin.workloads.formats.memory_trace import MemoryOp

_EXPANDABLE: Final = "expandable_segments:True"
_WHOLE: Final = tuple(range(10 * MIB, 48 * MIB, 2 * MIB))
"""Requests of these sizes leave nothing over: unsplit free segments, which garbage collection looks at."""
_EVENTS: Final = {"record_stream": 200, "event_complete": 120, "synchronize": 4, "empty_cache": 2}
_POOLS: Final = {"pools": 25, "empty_cache": 4}


def _near(*mib: int, streams: int = 1) -> Traffic:
    return Traffic(streams=streams, thresholds=(*THRESHOLDS, *(m * MIB for m in mib)))


CUDA_CONFIGURATIONS: Final = (
    Configuration("default"),
    Configuration("tiny device", capacity_bytes=64 * MIB),
    Configuration("two streams", traffic=Traffic(streams=2)),
    Configuration("three streams", traffic=Traffic(streams=3)),
    Configuration("empty_cache often", traffic=Traffic(weights={"empty_cache": 40})),
    Configuration("kv, concat", growth="exact"),
    Configuration("kv, doubling", growth="doubling"),
    Configuration("kv, static", growth="static", capacity_bytes=GIB),
    Configuration("expandable", _EXPANDABLE),
    Configuration("expandable, two streams", _EXPANDABLE, Traffic(streams=2)),
    Configuration("expandable, three streams", _EXPANDABLE, Traffic(streams=3)),
    Configuration("expandable, empty_cache often", _EXPANDABLE, Traffic(weights={"empty_cache": 40})),
    Configuration("expandable, kv", _EXPANDABLE, growth="exact"),
    Configuration("max_split", "max_split_size_mb:40", _near(40)),
    Configuration("max_split, least", "max_split_size_mb:20"),
    Configuration("max_split, three streams", "max_split_size_mb:25", _near(25, streams=3)),
    Configuration("max_split and tolerance", "max_split_size_mb:30,max_non_split_rounding_mb:50", _near(30, 50)),
    Configuration(
        "gc and fraction",
        "garbage_collection_threshold:0.4,per_process_memory_fraction:0.75",
        Traffic(thresholds=_WHOLE),
        capacity_bytes=GIB,
    ),
    Configuration(
        "gc and fraction, three streams",
        "garbage_collection_threshold:0.7,per_process_memory_fraction:0.9",
        Traffic(streams=3, thresholds=_WHOLE),
        capacity_bytes=2 * GIB,
    ),
    Configuration("gc without a cap", "garbage_collection_threshold:0.4"),
    Configuration("fraction", "per_process_memory_fraction:0.5", Traffic(greed=20, pressure=0.6)),
    Configuration(
        "fraction in mid-run",
        "garbage_collection_threshold:0.5",
        Traffic(weights={"set_fraction": 8, "empty_cache": 2, "reset_peak": 2, "reset_accumulated": 2}),
    ),
    Configuration("large segment", "large_segment_size_mb:64", _near(64)),
    Configuration("large segment, least", "large_segment_size_mb:11", _near(11)),
    Configuration("roundup", "roundup_power2_divisions:4"),
    Configuration("roundup by size", "roundup_power2_divisions:[1:8,4:2,16:4,>:1]", Traffic(streams=2)),
    Configuration(
        "max_split, gc and fraction",
        "max_split_size_mb:25,garbage_collection_threshold:0.6,per_process_memory_fraction:0.6",
        _near(25),
    ),
    Configuration(
        "large segment and max_split",
        "large_segment_size_mb:33,max_split_size_mb:36,max_non_split_rounding_mb:40",
        _near(33, 36),
    ),
    Configuration("roundup and max_split", "roundup_power2_divisions:8,max_split_size_mb:32", _near(32, streams=2)),
    Configuration("roundup and large segment", "roundup_power2_divisions:2,large_segment_size_mb:48", _near(48)),
    Configuration("expandable and max_split", f"{_EXPANDABLE},max_split_size_mb:30", _near(30)),
    Configuration(
        "expandable and max_split, three streams", f"{_EXPANDABLE},max_split_size_mb:40", _near(40, streams=3)
    ),
    Configuration(
        "expandable, gc and fraction",
        f"{_EXPANDABLE},garbage_collection_threshold:0.4,per_process_memory_fraction:0.75",
        Traffic(streams=2, thresholds=_WHOLE),
        capacity_bytes=GIB,
    ),
    Configuration(
        "expandable, max_split, gc and fraction",
        f"{_EXPANDABLE},max_split_size_mb:32,garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        _near(32),
    ),
    Configuration(
        "expandable, large segment and fraction",
        f"{_EXPANDABLE},large_segment_size_mb:32,per_process_memory_fraction:0.5",
        Traffic(greed=20, pressure=0.6),
    ),
    Configuration("expandable and large segment", f"{_EXPANDABLE},large_segment_size_mb:64", _near(64)),
    Configuration("expandable and roundup", f"{_EXPANDABLE},roundup_power2_divisions:4", Traffic(streams=3)),
    Configuration("other memory", traffic=Traffic(weights={"other_memory": 15, "empty_cache": 2})),
    Configuration("expandable, other memory", _EXPANDABLE, Traffic(weights={"other_memory": 15, "empty_cache": 2})),
    Configuration("resets", traffic=Traffic(weights={"reset_peak": 10, "reset_accumulated": 10, "empty_cache": 2})),
    Configuration(
        "settings in mid-run",
        traffic=Traffic(
            weights={"set_conf": 12, "empty_cache": 2},
            texts=(
                _EXPANDABLE,
                _EXPANDABLE,
                "expandable_segments:False",
                "roundup_power2_divisions:4",
                "roundup_power2_divisions:[1:8,4:2,16:4,>:1]",
                "large_segment_size_mb:32",
                "large_segment_size_mb:20",
                "per_process_memory_fraction:0.8",
                "garbage_collection_threshold:0.5",
                "throw_on_cudamalloc_oom:True",
                "expandable_segments:maybe",
                "max_split_size_mb:19",
                "per_process_memory_fraction:2",
                "",
            ),
        ),
    ),
    Configuration("pools", traffic=Traffic(greed=0, weights=_POOLS)),
    Configuration(
        "pools with options",
        traffic=Traffic(greed=0, pressure=0.9, weights=_POOLS, pool_flags=("", "use_on_oom", "no_split")),
    ),
    Configuration(
        "pools, max_split and gc",
        "max_split_size_mb:32,garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        Traffic(
            greed=0,
            pressure=0.8,
            weights=_POOLS,
            pool_flags=("", "use_on_oom", "no_split"),
            thresholds=(*THRESHOLDS, 32 * MIB),
        ),
    ),
    Configuration("pools, three streams", traffic=Traffic(streams=3, greed=0, weights=_POOLS)),
    Configuration(
        "pools and expandable", _EXPANDABLE, Traffic(greed=0, pressure=0.9, weights=_POOLS, dead_pools_only=True)
    ),
    Configuration("events on twelve streams", traffic=Traffic(streams=12, weights=_EVENTS), capacity_bytes=GIB),
    Configuration(
        "events, max_split and gc",
        "max_split_size_mb:32,garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
        Traffic(streams=3, weights=_EVENTS, thresholds=(*THRESHOLDS, 32 * MIB)),
    ),
    Configuration("events", traffic=Traffic(streams=2, weights=_EVENTS)),
    Configuration("events on three streams", traffic=Traffic(streams=3, weights=_EVENTS)),
    Configuration("events and expandable", _EXPANDABLE, Traffic(streams=3, weights=_EVENTS)),
)


def cuda_trace(c: Configuration, operations: int, seed: int = 0) -> list[MemoryOp]:
    """About that many operations. A MemPool never dies inside a scope: torch 2.11 fails an assertion there."""
    return list(_without_deaths_in_scopes(c.trace(operations, seed)))


def _without_deaths_in_scopes(ops: list[MemoryOp]) -> Iterator[MemoryOp]:
    entered = 0
    for op in ops:
        entered += (op.op == "mempool_begin") - (op.op == "mempool_end")
        if not (entered and op.op == "mempool_delete"):
            yield op
