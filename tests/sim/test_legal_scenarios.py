"""The generator of scenarios that other tests share: legal without exception, and no key is left out in silence."""

from __future__ import annotations

from collections import defaultdict

from hbmtwin.allocators.registry import device_allocators
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, known_keys
from hbmtwin.sim.scheduler import schedulers

from .legal_scenarios import KINDS, numbered

LEFT_OUT = {
    "schema_version": "has one value",
    "kv_cache.preset": "a name for other keys",
    "calibration.profile": "other figures for the same times, in test_calibration.py",
    "workload.preset": "a name for other keys",
    "workload.multi_turn": "a file that says what the other keys say",
    "workload.model": "a file that says what the other keys say",
    "workload.rate_scale": "concerns such a model",
    "workload.trace_format": "says what the file's columns say",
    "workload.trace_block_size": "concerns files with hash_ids",
    "workload.trace_jitter": "concerns files whose times are ticks",
    "workload.trace_skip": "says with which line of a file traffic begins",
    "workload.skip_bad_lines": "concerns files with bad lines",
    "workload.keep_failed": "concerns files with failed calls",
}
"""Keys that no scenario sets, and why."""


def test_every_draw_is_served_and_every_key_takes_every_value() -> None:
    """From fixed seeds of Python's own generator. Twin refuses what is illegal, and what does not fit."""
    drawn: defaultdict[str, set[str]] = defaultdict(set)
    for seed in range(120):
        keys = numbered(seed)
        Twin(Scenario.of(keys))
        for key, value in keys.items():
            drawn[key].add(str(value))
    assert set(known_keys()) - drawn.keys() == LEFT_OUT.keys()
    assert {key for key, values in drawn.items() if len(values) < 2} == {"engine.max_model_len", "workload.trace"}
    assert drawn["scheduler.policy"] == set(schedulers.names())
    assert drawn["memory.kv_arena"] == set(device_allocators.names())
    assert drawn["kv_cache.policy"] == {"paged", "radix", "contiguous", "virtual"}
    assert drawn["kv_cache.version"] == {"0.27", "0.22", "0.18", "v0"}


def test_a_kind_and_a_scheduler_can_be_asked_for() -> None:
    for kind in KINDS:
        keys = numbered(7, kind=kind)
        assert keys["kv_cache.policy"] == {"v0": "paged", "windows": "paged", "states": "paged"}.get(kind, kind)
    assert numbered(7, kind="paged", scheduler="max_utilization")["scheduler.policy"] == "max_utilization"
