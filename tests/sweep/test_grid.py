"""Words of a grid, and their combinations."""

from __future__ import annotations

import pytest

from hbmtwin.sim.scenario import ScenarioError
from hbmtwin.sim.sweep.grid import parse_axis, parse_grid


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("workload.users=10:50:20", ("10", "30", "50")),
        ("workload.users=10:45:20", ("10", "30")),
        ("workload.users=5", ("5",)),
        ("workload.users=1,10:30:10,30", ("1", "10", "20", "30")),  # what comes twice runs once
        (
            "engine.gpu_memory_utilization=0.1:0.5:0.1",
            ("0.1", "0.2", "0.3", "0.4", "0.5"),
        ),  # as floats: 0.30000000000000004
        ("workload.request_rate=0.5:2:0.75", ("0.5", "1.25", "2")),
        ("device.memory_bytes=32GiB:48GiB:8GiB", ("32GiB", "40GiB", "48GiB")),
        ("kv_cache.preset=paged, doubling", ("paged", "doubling")),
        (
            'workload.output_tokens={distribution="uniform", low=1, high=9},7',
            ('{distribution="uniform", low=1, high=9}', "7"),
        ),
        ("kv_cache.retention=truncate(64),full", ("truncate(64)", "full")),
        ('memory.alloc_conf="max_split_size_mb:64,garbage_collection_threshold:0.6"', None),
        ("memory.alloc_conf=expandable_segments:True", ("expandable_segments:True",)),
    ],
)
def test_a_word_becomes_an_axis(word: str, values: tuple[str, ...] | None) -> None:
    assert parse_axis(word).values == ((word.partition("=")[2],) if values is None else values)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("workload.users", "write key=a,b,c or key=start:stop:step"),
        ("workload.users=", "write key=a,b,c"),
        ("=3", "write key=a,b,c"),
        ("workload.usrs=3", "workload.usrs: unknown key; did you mean 'workload.users'?"),
        ("users=3", "users: unknown key"),
        ("seed=1,2", "use --seeds N"),
        ("workload.users=1,,2", "a value is missing beside a comma"),
        ("workload.users=[1,2", "a ] is missing"),
        ("workload.users=10:x:2", "10:x:2 is no range"),
        ("workload.users=10:20:2GiB", "is no range; write start:stop:step as three numbers with one unit"),
        ("workload.users=20:10:1", "has no values"),
        ("workload.users=10:20:0", "the step must be above 0"),
        ("workload.users=10:20:-1", "the step must be above 0"),
        ("workload.users=1:1000000:1", "has 1,000,000 values; at most 10,000"),
    ],
)
def test_a_word_that_is_none_is_refused(word: str, said: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        parse_axis(word)
    assert said in str(refused.value)


def test_the_last_axis_goes_fastest() -> None:
    grid = parse_grid(["kv_cache.preset=paged,doubling", "workload.users=1:2:1"])
    assert len(grid) == 4
    assert [tuple(settings.values()) for settings in grid.combinations()] == [
        ("paged", "1"),
        ("paged", "2"),
        ("doubling", "1"),
        ("doubling", "2"),
    ]


def test_a_key_stands_in_one_place() -> None:
    with pytest.raises(ScenarioError, match="is given twice"):
        parse_grid(["workload.users=1", "workload.users=2"])
    with pytest.raises(ScenarioError, match="--grid varies it"):
        parse_grid(["workload.users=1"], ["workload.users=2"])
