"""Error bars: every row is a run of its own with one figure at an end, rows of several runs are of the same end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.api import Result, Scenario, compare, error_bars, error_bars_to_dicts, run, runs_for_error_bars
from hbmtwin.sim.capacity.assumptions import applied
from hbmtwin.sim.capacity.error_bars import (
    MEASURES,
    ORDERED,
    End,
    ErrorBars,
    Extreme,
    Moved,
    Outcome,
    ends_of,
    outcome_of,
)

from ...tiny_scenario import TINY

Dicts = dict[str, dict[str, Any]]
SHORT = ("workload.num_prompts=3", "workload.output_tokens=20")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def results(tiny: Path) -> dict[str, Result]:
    return compare(tiny, ["doubling", "paged"], jobs=1)


@pytest.fixture(scope="module")
def told(results: dict[str, Result]) -> Dicts:
    return error_bars_to_dicts(error_bars(results, jobs=1))


def test_an_example(told: Dicts) -> None:
    assert told["paged"]["bars"]["ttft_p99_s"] == {
        "value": 0.04450870005,
        "least": 0.04208333658,
        "least_at": {"figure": "weight_bandwidth_efficiency", "end": "high", "at": 0.94},
        "most": 0.05425514322,
        "most_at": {"figure": "host_layer_ns", "end": "high", "at": 1_000_000},
        "missing": 0,
        "moved_most_by": "host_layer_ns",
    }
    assert told["paged"]["bars"]["requests_completed"] == {
        "value": 10,
        "least": 10,
        "least_at": None,
        "most": 10,
        "most_at": None,
        "missing": 0,
        "moved_most_by": None,
    }
    peak = told["paged"]["bars"]["peak_reserved_bytes"]
    assert (peak["least"], peak["most"]) == (15_843_983_360, 15_978_201_088)
    assert peak["most_at"] == {"figure": "non_torch_bytes", "end": "low", "at": 0}  # more is left for the pool


def test_the_order_of_two_runs_turns_at_two_ends(told: Dicts) -> None:
    order = told["paged"]["order"]
    assert order["tpot_p99_s"]["doubling"] == {
        "run": "below",
        "below": 33,
        "above": 0,
        "level": 0,
        "none": 0,
        "otherwise": [],
    }
    assert order["ttft_p99_s"]["doubling"] == {
        "run": "below",
        "below": 31,
        "above": 2,
        "level": 0,
        "none": 0,
        "otherwise": [
            {"figure": "attention_launch_ns", "end": "high", "relation": "above"},
            {"figure": "layer_overhead_ns", "end": "high", "relation": "above"},
        ],
    }
    assert told["doubling"]["order"]["ttft_p99_s"]["paged"]["below"] == 2


# -- each row is the run that it says ----------------------------------------------------------------------------------


def wrong(told: Dicts, results: dict[str, Result], folder: Path) -> list[str]:
    """What differs from runs that are made here one by one, and from the rows themselves."""
    found = []
    for name, one in told.items():
        own = outcome_of(results[name].summary)
        lower = [end["at"] < end["value"] for end in one["ends"]]
        if lower != [end["end"] == "low" for end in one["ends"]]:
            found.append(f"label {name}")
        for end in one["ends"][::5]:
            scenario = applied(results[name].scenario, {end["figure"]: end["at"]}, folder)
            there = outcome_of(run(scenario).summary)
            if (end["outcome"], {measure: end[measure] for measure in MEASURES}) != (there.outcome, there.numbers):
                found.append(f"row {name} {end['figure']} {end['end']}")
        for measure, bar in one["bars"].items():
            values = [v for v in (own.numbers[measure], *(end[measure] for end in one["ends"])) if v is not None]
            if (bar["least"], bar["most"]) != ((min(values), max(values)) if values else (None, None)):
                found.append(f"bar {name} {measure}")
        for measure in ORDERED:
            for other, order in one["order"][measure].items():
                pairs = [(a[measure], b[measure]) for a, b in zip(one["ends"], told[other]["ends"], strict=True)]
                if order["below"] != sum(b - a > 1e-6 * b for a, b in pairs):
                    found.append(f"order {name} {other} {measure}")
        if [(e["figure"], e["end"]) for e in one["ends"]] != [(e["figure"], e["end"]) for e in told["paged"]["ends"]]:
            found.append(f"pairs {name}")
    return found


def test_every_row_is_a_run_of_its_own(told: Dicts, results: dict[str, Result], tmp_path: Path) -> None:
    assert wrong(told, results, tmp_path) == []


def _swap(told: Dicts) -> None:
    bar = told["paged"]["bars"]["ttft_p99_s"]
    bar["least"], bar["most"] = bar["most"], bar["least"]


def _rotate(told: Dicts) -> None:
    ends = told["doubling"]["ends"]
    told["doubling"]["ends"] = [*ends[1:], ends[0]]


def _the_other_end(told: Dicts) -> None:
    """Rows that say one end and are of the other."""
    ends = told["doubling"]["ends"]
    for low, high in zip(ends[::2], ends[1::2], strict=False):
        for measure in MEASURES:
            low[measure], high[measure] = high[measure], low[measure]


def _the_other_label(told: Dicts) -> None:
    for end in told["paged"]["ends"]:
        end["end"] = "low" if end["end"] == "high" else "high"


def _widest_of_all(told: Dicts) -> None:
    told["paged"]["bars"]["tpot_p99_s"]["most"] *= 2


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (_the_other_label, "label paged"),
        (_swap, "bar paged ttft"),
        (_rotate, "pairs"),
        (_the_other_end, "row doubling"),
        (_widest_of_all, "bar paged t"),
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[Dicts], None], said: str, told: Dicts, results: dict[str, Result], tmp_path: Path
) -> None:
    bugged = copy.deepcopy(told)
    bug(bugged)
    assert any(one.startswith(said) for one in wrong(bugged, results, tmp_path))


def test_unpaired_bars_have_no_order(results: dict[str, Result]) -> None:
    own = outcome_of(results["paged"].summary)
    one = ErrorBars(own, (Moved(End("sync_ns", "low"), None, own),))
    assert one.order(one, "ttft_p99_s").count("level") == 1
    with pytest.raises(ValueError, match="not of the same ends"):
        one.order(ErrorBars(own, ()), "ttft_p99_s")


def test_jobs_change_nothing_and_each_run_is_told(tiny: Path) -> None:
    result = {"paged": run(Scenario.load(tiny, overrides=SHORT))}
    names: list[str] = []
    one, two = error_bars(result, jobs=1, finished=names.append), error_bars(result, jobs=2)
    assert error_bars_to_dicts(one) == error_bars_to_dicts(two)
    assert "order" not in error_bars_to_dicts(one)["paged"]
    assert len(names) == 33 == runs_for_error_bars({"paged": result["paged"].scenario})
    assert names[0] == "paged: memory_bytes = 3.166e+10"


# -- which ends ------------------------------------------------------------------------------------------------------


def test_an_end_at_which_the_server_does_not_start_is_a_row(tiny: Path) -> None:
    tight = ("engine.gpu_memory_utilization=0.46", "workload.request_rate=inf", *SHORT)
    told = error_bars_to_dicts(error_bars({"": run(Scenario.load(tiny, preset="paged", overrides=tight))}, jobs=1))[""]
    refused = [end for end in told["ends"] if end["outcome"] == "does_not_start"]
    assert [(end["figure"], end["end"]) for end in refused] == [
        ("activation_bytes", "high"),
        ("non_torch_bytes", "high"),
    ]
    assert "the pool has 6" in refused[0]["cause"]
    assert refused[0]["ttft_p99_s"] is None
    assert told["bars"]["ttft_p99_s"]["missing"] == 2


def test_an_end_that_is_the_value_itself_is_none(tiny: Path) -> None:
    ends = ends_of({"paged": Scenario.load(tiny)})
    assert End("context_bytes", "high") in ends
    assert End("context_bytes", "low") not in ends  # 0, as it is


def test_bandwidth_between_devices_is_moved_where_there_are_several(tiny: Path) -> None:
    def figures(*overrides: str) -> set[str]:
        return {end.figure for end in ends_of({"": Scenario.load(tiny, overrides=overrides)})}

    between = {"link_bandwidth_bytes_per_s", "send_ns", "send_bandwidth_bytes_per_s"}
    assert not between & figures()
    assert between <= figures("engine.pipeline_parallel_size=2")
    assert {"allreduce_ns", "link_bandwidth_bytes_per_s"} <= figures("engine.tensor_parallel_size=2")


def test_what_is_left_out_on_one_device_changes_no_run_there(tiny: Path, tmp_path: Path) -> None:
    scenario = Scenario.load(tiny, overrides=SHORT)
    moved = applied(scenario, {"link_bandwidth_bytes_per_s": 1e9, "send_ns": 1e6}, tmp_path)
    assert outcome_of(run(moved).summary) == outcome_of(run(scenario).summary)


def test_a_run_without_that_range_stands_in_the_row_as_it_is(tiny: Path) -> None:
    """A variant with its activations given: of the others alone they are a guess. Libraries and graphs are of all."""
    given = ["memory.activation_bytes=200MiB"]
    results = compare(tiny, ["paged"], variants={"given": given}, overrides=SHORT, jobs=1)
    scenarios = {name: result.scenario for name, result in results.items()}
    ends = ends_of(scenarios)
    lone = [end for end, each in ends.items() if "given" not in each]
    assert lone == [End("activation_bytes", "low"), End("activation_bytes", "high")]
    bars = error_bars(results, jobs=1)
    assert [one.end for one in bars["given"].moved] == [one.end for one in bars["paged"].moved] == list(ends)
    as_it_is = [one for one in bars["given"].moved if one.end in lone]
    assert all(one.at is None and one.outcome == bars["given"].own for one in as_it_is)
    assert runs_for_error_bars(scenarios) == 2 * len(ends) - len(lone)


def test_times_of_an_end_that_the_server_does_not_live_through_are_not_in_the_bar(results: dict[str, Result]) -> None:
    own = outcome_of(results["paged"].summary)
    dead = Outcome("out_of_memory", "growth_copy", {**own.numbers, "ttft_p99_s": 0.001, "died_at_s": 3.5})
    bars = ErrorBars(own, (Moved(End("sync_ns", "low"), None, dead),)).bars
    assert bars["ttft_p99_s"][1:4] == (Extreme(own.numbers["ttft_p99_s"] or 0, None),) * 2 + (1,)
    assert bars["died_at_s"].most is not None
    assert bars["died_at_s"].most.value == 3.5
