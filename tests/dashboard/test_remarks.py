"""Notes and alerts, line by line."""

from __future__ import annotations

from typing import Any

from hbmtwin.dashboard.remarks import METRICS, alert_lines, alert_text, remarks
from hbmtwin.sim.monitor import limits_of
from hbmtwin.sim.sections import ResultsSection


def alert(**changes: Any) -> dict[str, Any]:
    first = {"metric": "usage", "kind": "above", "threshold": 0.9, "time_s": 12.34, "value": 0.91, "worst": 0.975}
    return {**first, "cleared_s": 1040.0, **changes}


def summary(*, notes: tuple[str, ...] = (), alerts: int = 0) -> dict[str, Any]:
    return {"notes": list(notes), "alerts": [alert(time_s=float(i)) for i in range(alerts)]}


def test_an_alert_is_a_sentence() -> None:
    assert alert_text(alert()) == "KV usage above 90.0 % from 12.3 s to 1,040.0 s, at most 97.5 %"
    low = alert(metric="hit_rate", kind="below", worst=0.0, cleared_s=None)
    assert alert_text(low) == "KV hit rate below 90.0 % from 12.3 s to the end, down to 0.0 %"
    size = alert(metric="used_bytes", threshold=12 * 2**30, worst=3 * 2**33)
    assert alert_text(size) == "KV in use above 12.00 GiB from 12.3 s to 1,040.0 s, at most 24.00 GiB"


def test_every_series_of_the_monitor_has_its_words() -> None:
    section = ResultsSection(alert_kv_used_bytes=1, alert_kv_usage=0.5, alert_hit_rate=0.5)
    assert [limit.metric for limit in limits_of(section)] == list(METRICS)


def test_three_alerts_are_told_and_the_others_counted() -> None:
    assert len(list(alert_lines(summary(alerts=3)))) == 3
    lines = list(alert_lines(summary(alerts=1203)))
    assert len(lines) == 4
    assert lines[-1] == "and 1,200 more alerts, all in summary.json and with --json"


def test_a_note_of_all_runs_stands_alone_and_another_names_them() -> None:
    told = remarks(
        {
            "a": summary(notes=("for all", "for two")),
            "b": summary(notes=("for all", "for two"), alerts=1),
            "c": summary(notes=("for one", "for all")),
        }
    )
    assert told == [
        "for all",
        "a, b: for two",
        "c: for one",
        "b: KV usage above 90.0 % from 0.0 s to 1,040.0 s, at most 97.5 %",
    ]
