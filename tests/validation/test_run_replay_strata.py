"""Which steps of a run are chosen and what they stand for, how much of a model fits, and a device's cap and events."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from hbmtwin.validation.run_replay.decodable import NoDecoder
from hbmtwin.validation.run_replay.meter import stopwatch_of
from hbmtwin.validation.run_replay.room import Need, Room, free_host_bytes, layers_that_fit, room_of
from hbmtwin.validation.run_replay.steps import _prepared
from hbmtwin.validation.run_replay.strata import RunSteps, choose

GIB = 1 << 30


# -- which steps -------------------------------------------------------------------------------------------------------


def table(*rows: tuple[int, int, list[int], list[int], int]) -> pd.DataFrame:
    """Rows of step, repeat, new tokens, contexts and ns a step, one behind the other in time."""
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "start_ns", "new_tokens", "context_tokens")}
    columns["step_ends_ns"] = []
    now = 0
    for step, repeat, new, context, each in rows:
        columns["step"].append(step)
        columns["start_ns"].append(now)
        columns["new_tokens"].append(new)
        columns["context_tokens"].append(context)
        columns["step_ends_ns"].append([now + each * (i + 1) for i in range(repeat)])
        now += repeat * each
    return pd.DataFrame(columns)


def test_leaps_are_taken_apart_with_their_contexts_and_steps_of_nobody_are_none() -> None:
    steps = RunSteps(table((0, 1, [7], [0], 50), (1, 3, [1], [7], 10), (4, 1, [], [], 5), (5, 1, [1, 1], [3, 4], 20)))
    assert len(steps) == 5
    assert steps.times_ns.tolist() == [50, 10, 10, 10, 20]
    batches = [steps.batch(i) for i in range(5)]
    assert [(b.step, b.context_tokens, b.duration_ns) for b in batches] == [
        (0, (0,), 50),
        (1, (7,), 10),
        (2, (8,), 10),
        (3, (9,), 10),
        (5, (3, 4), 20),
    ]


def test_every_batch_size_has_a_share_by_its_time_and_the_longest_stands_for_itself() -> None:
    rows = [(0, 1, [400], [0], 900)]
    rows += [(1, 60, [1], [400], 10), (61, 30, [1] * 3, [9] * 3, 20), (91, 30, [1] * 4, [9] * 4, 20)]
    rows += [(121, 2, [8, 1], [0, 9], 30)]
    chosen = choose(RunSteps(table(*rows)), 9)
    found = [(c.batch.step, len(c.batch.new_tokens), c.stands_for) for c in chosen]
    # 600 of one sequence, 1,200 of three or four, which are one stratum, 60 of the mixed ones
    assert found == [(0, 1, 1.0), (16, 1, 30.0), (46, 1, 30.0), (67, 3, 12.0), (79, 3, 12.0), (91, 4, 12.0),
                     (103, 4, 12.0), (115, 4, 12.0), (122, 2, 2.0)]  # fmt: skip
    assert sum(c.stands_for for c in chosen) == 123
    assert chosen == choose(RunSteps(table(*rows)), 9)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 50, 122, 123, 1000])
def test_as_many_as_asked_for_none_twice_and_in_order(most: int) -> None:
    rows = [(0, 1, [400], [0], 900), (1, 60, [1], [400], 10), (61, 30, [1] * 3, [9] * 3, 20)]
    rows += [(91, 30, [1] * 9, [9] * 9, 20), (121, 2, [8, 1], [0, 9], 30)]
    numbers = [c.batch.step for c in choose(RunSteps(table(*rows)), most)]
    assert len(numbers) == min(most, 123)
    assert numbers == sorted(set(numbers))
    assert 0 in numbers
    if most >= 123:
        assert {c.stands_for for c in choose(RunSteps(table(*rows)), most)} == {1.0}


# -- how much fits -----------------------------------------------------------------------------------------------------


def test_layers_that_fit_in_literal_bytes() -> None:
    need = Need(ends=100, layer=30, step=20)
    assert need.of(4) == 240
    for room, layers in ((240, 4), (239, 3), (150, 1), (149, 0), (119, 0), (10, 0), (10_000, 4)):
        assert layers_that_fit(need, Room(room, ""), 4) == layers


def test_what_a_host_has_is_the_least_of_its_memory_and_its_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:    60 kB\n")
    limit, used = tmp_path / "max", tmp_path / "current"
    assert free_host_bytes(meminfo, ((limit, used),)) == 60 * 1024
    limit.write_text("max\n")
    used.write_text("7\n")
    assert free_host_bytes(meminfo, ((limit, used),)) == 60 * 1024
    limit.write_text("50000\n")
    used.write_text("20000\n")
    assert free_host_bytes(meminfo, ((limit, used),)) == 30_000
    meminfo.write_text("MemTotal: 100 kB\n")
    limit.write_text("max\n")
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert free_host_bytes(meminfo, ((limit, used),)) == free_host_bytes(tmp_path / "none", ()) == half


# -- a device that is none ---------------------------------------------------------------------------------------------


class Device:
    """torch's module of a device, as far as it is asked: 8 GiB, half of it free."""

    class Event:
        clock = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self) -> None:
            self.at = Device.Event.clock

        def elapsed_time(self, other: Device.Event) -> float:
            return other.at - self.at

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self.emptied = 0

    def mem_get_info(self) -> tuple[int, int]:
        return 4 * GIB, 8 * GIB

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.fractions.append(fraction)

    def empty_cache(self) -> None:
        self.emptied += 1

    def synchronize(self) -> None:
        pass


class TorchOf:
    OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})

    def __init__(self) -> None:
        self.cuda = Device()


def test_a_device_has_a_cap_and_gets_its_memory_back_where_it_runs_out() -> None:
    fake = TorchOf()
    assert room_of(fake, "cuda") == Room(
        int(4 * GIB * 0.9), "4.00 GiB of the device are free, of which 90% may be taken"
    )
    capped = room_of(fake, "cuda", GIB)
    assert capped.bytes == GIB
    assert capped.said.endswith(", and the run's device.memory_bytes are 1.00 GiB")
    with _prepared(fake, "cuda", 1, capped):
        assert fake.cuda.fractions == [0.125]
    assert (fake.cuda.fractions, fake.cuda.emptied) == ([0.125, 1.0], 1)
    with (
        pytest.raises(NoDecoder, match=r"memory ran out under the cap of 1\.00 GiB: CUDA out of memory"),
        _prepared(fake, "cuda", 1, capped),
    ):
        raise TorchOf.OutOfMemoryError("CUDA out of memory. Tried to\nallocate")
    assert (fake.cuda.fractions[-1], fake.cuda.emptied) == (1.0, 2)


def test_events_are_summed_and_forgotten() -> None:
    watch = stopwatch_of(TorchOf(), "cuda")
    assert watch.clock == "events"

    def work() -> str:
        Device.Event.clock += 1.5
        return "done"

    assert [watch.around(work), watch.around(work)] == ["done", "done"]
    assert watch.taken_ns() == 3_000_000
    assert watch.taken_ns() == 0
