"""The comparison report: one HTML page, and ``plotly.min.js`` beside it, that works without a network."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from hbmtwin.api import Result
from hbmtwin.dashboard.address_map import address_map, moments
from hbmtwin.dashboard.figures import (
    inline,
    kv_monitor_over_time,
    kv_utilization,
    latency_by_turn,
    memory_over_time,
)
from hbmtwin.dashboard.remarks import alert_text, remarks
from hbmtwin.dashboard.server_figure import server_over_time
from hbmtwin.dashboard.settings import settings_table
from hbmtwin.dashboard.standstill import recomputed_text, standstill_in_words, thrashing_text
from hbmtwin.dashboard.verdict import (
    HEADER,
    basis_text,
    ended_early,
    goodput_text,
    headline,
    oom_in_words,
    rejections_text,
    rows,
    same_traffic,
    server_log,
    traffic_changes,
)

MAX_MOMENTS = 8
"""Address maps of one policy that a report carries: the last one (which is the death, if it died) is always there."""
MAX_ALERTS = 50
"""Alerts of one run that a report lists."""


PROFILE = "calibration.profile "
"""In a note on steps outside of what a profile was measured for."""


def write_report(results: Mapping[str, Result], path: Path) -> None:
    """Write the page at *path* and ``plotly.min.js`` beside it; same results, same bytes.

    Raise OSError, and ValueError without results.
    """
    if not results:
        raise ValueError("a report needs at least one result")
    summaries = {name: result.summary for name, result in results.items()}
    one = next(iter(results.values()))
    died = [name for name, summary in summaries.items() if ended_early(summary)]
    template = Template(files("hbmtwin.dashboard").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=_title(results),
        setting=html.escape(_setting(one)),
        same=html.escape(f". {same_traffic(results)}") if len(results) > 1 else "",
        headline=html.escape(headline(summaries)),
        table=_table(results),
        settings=_settings(results),
        deaths="\n".join(_death(name, summaries[name]) for name in died),
        goodput="\n".join(_goodput(name, s["goodput"]) for name, s in summaries.items() if s["goodput"]),
        memory=inline(memory_over_time(results), "memory"),
        server=inline(server_over_time(results), "server"),
        monitor=inline(kv_monitor_over_time(results), "monitor"),
        alerts=_alerts(summaries),
        utilization=inline(kv_utilization(results), "utilization"),
        latency=inline(latency_by_turn(results), "latency"),
        maps=_maps(results),
        first=died[0] if died else next(iter(results)),
        basis=html.escape(basis_text(summaries)),
        outside="\n".join(f"<p>{html.escape(line)}.</p>" for line in remarks(summaries) if PROFILE in line),
        version=html.escape(str(one.summary["version"])),
        seed=one.summary["seed"],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    path.write_text(page, encoding="utf-8")


def _title(results: Mapping[str, Result]) -> str:
    if len(results) == 1:
        return "one run"
    return "KV-memory policies compared" if traffic_changes(results) else "KV-memory policies on the same traffic"


def _setting(result: Result) -> str:
    w, summary = result.scenario.workload, result.summary
    if w.trace is not None:
        traffic = f"traffic: {Path(w.trace).name}"
    elif w.users is not None:
        traffic = f"traffic: {w.users:,} users in a closed loop"
    elif w.request_rate is not None:
        rate = f"{w.request_rate:g} sessions a second"
        traffic = "traffic: all at once" if math.isinf(w.request_rate) else f"traffic: {rate}"
    else:
        traffic = "built-in traffic"
    device = f"{result.scenario.device.name} ({summary['capacity_bytes'] / 2**30:.2f} GiB)"
    return f"{result.scenario.model.name} on {device}; {traffic}"


def _death(name: str, summary: Mapping[str, Any]) -> str:
    if summary["oom"] is None:
        return f'<p class="oom"><strong>{html.escape(name)}.</strong> {html.escape(standstill_in_words(summary))}</p>'
    log = f"<br><small>{html.escape(text)}</small>" if (text := server_log(summary["oom"])) else ""
    return f'<p class="oom"><strong>{html.escape(name)}.</strong> {html.escape(oom_in_words(summary["oom"]))}{log}</p>'


def _goodput(name: str, goodput: Mapping[str, Any]) -> str:
    return f"<p><strong>{html.escape(name)}</strong>: goodput {html.escape(goodput_text(goodput))}.</p>"


def _table(results: Mapping[str, Result]) -> str:
    summaries = {name: result.summary for name, result in results.items()}
    head = "".join(f"<th>{html.escape(title)}</th>" for title in HEADER)
    body = []
    for (name, summary), cells in zip(summaries.items(), rows(summaries), strict=True):
        kind = ' class="died"' if ended_early(summary) else ""
        hint = html.escape(rejections_text(summary))
        body.append(f'<tr{kind} title="{hint}" data-policy="{html.escape(name)}">')
        body.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _settings(results: Mapping[str, Result]) -> str:
    header, cells = settings_table({name: result.scenario for name, result in results.items()})
    if len(header) == 1:
        return ""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return (
        "<details><summary>Settings that differ (–: does not concern it)</summary>"
        f'<div class="wide"><table class="settings"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        "</details>"
    )


def _alerts(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """How much was computed again, and the alerts of each run behind a line that counts them; empty without either."""
    parts = []
    for name, summary in summaries.items():
        if summary.get("recomputed_tokens"):
            text = f"recomputed tokens: {recomputed_text(summary)}"
            if summary["thrashing"]:
                text += f"; {thrashing_text(summary)}"
            parts.append(f"<p><strong>{html.escape(name)}</strong>: {html.escape(text)}.</p>")
        if alerts := summary["alerts"]:
            count = f"{len(alerts):,} alerts" if len(alerts) > 1 else "1 alert"
            items = "".join(f"<li>{html.escape(alert_text(alert))}</li>" for alert in alerts[:MAX_ALERTS])
            more = f"<li>and {len(alerts) - MAX_ALERTS:,} more in summary.json</li>" if len(alerts) > MAX_ALERTS else ""
            parts.append(
                f"<details><summary><strong>{html.escape(name)}</strong>: {count}, the first: "
                f"{html.escape(alert_text(alerts[0]))}</summary><ul>{items}{more}</ul></details>"
            )
    return "\n".join(parts)


def _maps(results: Mapping[str, Result]) -> str:
    maps: dict[str, list[dict[str, object]]] = {}
    for name, result in results.items():
        times = moments(result)
        if len(times) > MAX_MOMENTS:
            times = [times[round(i * (len(times) - 1) / (MAX_MOMENTS - 1))] for i in range(MAX_MOMENTS)]
        oom = result.summary["oom"]
        maps[name] = [
            {
                "label": f"{time / 1e9:,.1f} s"
                + (", out of memory" if oom is not None and time == round(oom["time_s"] * 1e9) else ""),
                "figure": json.loads(address_map(result, time).to_json()),
            }
            for time in times
        ]
    return json.dumps(maps).replace("</", "<\\/")
