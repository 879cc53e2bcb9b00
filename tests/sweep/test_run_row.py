"""A run as a row: every way to end, and the numbers of the summary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hbmtwin.sim.run import Twin, run
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row, run_row
from hbmtwin.sim.sweep.scenario_key import scenario_key


def row_of(path: Path, *overrides: str) -> Row:
    row = run_row(Scenario.load(path, overrides=overrides))
    assert list(row) == list(ROW_COLUMNS)
    for name, value in row.items():
        assert value is None or type(value) is ROW_COLUMNS[name], name
    return row


def test_a_run_that_held_says_what_its_summary_says(tiny: Path) -> None:
    scenario = Scenario.load(tiny, overrides=["slo.ttft_s=0.001", "workload.request_rate=inf"])
    row, result = run_row(scenario), run(scenario)
    s = result.summary
    assert (row["outcome"], row["cause"], row["died_at_s"], row["error"]) == ("held", None, None, None)
    assert (row["key"], row["seed"]) == (scenario_key(scenario), 0)
    for name in ("requests_total", "requests_completed", "peak_reserved_bytes", "makespan_s", "kv_usage_mean"):
        assert row[name] == s[name]
    assert row["ttft_p99_s"] == s["ttft_s"]["p99"]
    assert row["e2e_p50_s"] == s["e2e_s"]["p50"]
    e2e = (result.requests["end_ns"] - result.requests["arrival_ns"]) / 1e9
    assert row["e2e_p95_s"] == pytest.approx(float(np.percentile(e2e, 95)), abs=1e-12)
    assert row["share_met"] == s["goodput"]["share_met"]
    assert row["requests_per_s"] == 4 / s["makespan_s"]
    assert row["output_tokens_per_s"] == 32 / s["makespan_s"]
    assert row["most_running"] == 4


def test_the_least_free_counts_peaks_within_steps(tiny: Path) -> None:
    """Buffers of pages come and go at the driver; a copy within a step is in no row of the timeline."""
    scenario = Scenario.load(
        tiny,
        overrides=[
            "kv_cache.preset=doubling",
            "memory.kv_arena=direct",
            "kv_cache.initial_tokens=16",
            "workload.output_tokens=60",
        ],
    )
    row, twin = run_row(scenario), Twin(scenario)
    result = twin.run()
    least = row["least_free_bytes"]
    assert isinstance(least, int)
    assert 0 < least < int(result.timeline["driver_free"].min())


@pytest.mark.parametrize(
    ("overrides", "outcome", "cause", "error"),
    [
        (["device.memory_bytes=100MiB"], "does_not_fit", "does_not_fit", "no memory is left for KV"),
        (["workload.users=2", "workload.request_rate=3"], "illegal", "illegal", "a closed loop has no request_rate"),
        (["kv_cache.policy=pagd"], "illegal", "illegal", "did you mean 'paged'"),
        (["model.name=nix/config.json"], "illegal", "illegal", "no such file"),
        (["workload.trace=nix.csv"], "failed", "WorkloadError", "WorkloadError: workload.trace: nix.csv"),
    ],
)
def test_what_does_not_run_says_why(tiny: Path, overrides: list[str], outcome: str, cause: str, error: str) -> None:
    row = row_of(tiny, *overrides)
    assert (row["outcome"], row["cause"]) == (outcome, cause)
    assert error in str(row["error"])
    assert row["requests_total"] is None


def test_a_bug_is_a_row(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Twin) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Twin, "run", broken)
    row = row_of(tiny)
    assert (row["outcome"], row["cause"], row["error"]) == (
        "failed",
        "ZeroDivisionError",
        "ZeroDivisionError: planted",
    )


def test_a_death_says_where() -> None:
    """The built-in traffic under doubling buffers: 18 sessions are in the server when a growth copy finds no room."""
    scenario = Scenario.load(overrides=["kv_cache.preset=doubling"])
    row, result = run_row(scenario), run(scenario)
    oom = result.oom
    assert oom is not None
    assert (row["outcome"], row["cause"], row["died_at_s"]) == ("out_of_memory", oom["cause"], oom["time_s"])
    failed = result.requests[result.requests["status"] == "failed"]
    assert row["died_users"] == len(set(failed["session"]))
    assert row["died_turn"] == result.requests.set_index("id").loc[oom["request"], "turn"]
    traced = run(Scenario.load(overrides=["kv_cache.preset=doubling", "results.memory_trace=true"])).memory_trace
    assert traced is not None
    assert row["died_operations"] == len(traced)


def test_rejections_for_want_of_memory_are_no_holding() -> None:
    row = run_row(Scenario.load(overrides=["kv_cache.preset=doubling", "memory.oom=reject"]))
    assert row["outcome"] == "rejected"
    assert row["cause"] == "out_of_memory"
