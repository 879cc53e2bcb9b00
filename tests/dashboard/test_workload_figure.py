"""Pictures of traffic: each request drawn once, what stands out named, and a page that says what the terminal does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hbmtwin.dashboard.palette import ALARM
from hbmtwin.dashboard.workload_figure import (
    BINS,
    arrivals_at_two_scales,
    bin_edges,
    length_distributions,
    reuse_by_capacity,
)
from hbmtwin.dashboard.workload_report import write_workload_report
from hbmtwin.dashboard.workload_words import facts, headline, lengths_table, windows_table
from hbmtwin.workloads import Request
from hbmtwin.workloads.records import user_stream
from hbmtwin.workloads.statistics.describe import Description, describe
from hbmtwin.workloads.statistics.lengths import length_statistics

S = 10**9


def traffic(n: int = 2000, *, shared: bool = True) -> list[Request]:
    draw = np.random.default_rng(5)
    times = np.cumsum(draw.exponential(0.7, n))
    requests = []
    for id, time_s in enumerate(times):
        prompt = 512 if draw.random() < 0.2 else int(draw.lognormal(6, 1)) + 1
        spans = (("system", 0, 32), (user_stream(id, 0), 0, prompt)) if shared else ((user_stream(id, 0), 0, prompt),)
        size = sum(length for _, _, length in spans)
        output = int(draw.integers(1, 900))
        requests.append(Request(id, id, 0, int(time_s * S), size, output, output, spans, tenant=id % 3))
    return requests


@pytest.fixture(scope="module")
def d() -> Description:
    return describe(traffic())


def test_every_request_is_in_the_whole_trace_and_the_busiest_minutes_are_its_busiest(d: Description) -> None:
    whole, fine = arrivals_at_two_scales(d).data
    assert sum(whole.y) == d.requests
    assert sum(fine.y) == d.arrivals.windows[3].most
    assert fine.x[0] == d.arrivals.fine.start_s + 0.5
    (mark,) = [shape for shape in arrivals_at_two_scales(d).layout.shapes if shape.type == "rect"]
    assert (mark.x0, mark.x1) == (d.arrivals.fine.start_s, d.arrivals.fine.start_s + 300)


def test_the_dashed_line_is_the_mean_of_each_scale(d: Description) -> None:
    lines = [shape for shape in arrivals_at_two_scales(d).layout.shapes if shape.type == "line"]
    rate = d.arrivals.request_rate
    assert rate is not None
    assert [line.y0 for line in lines] == [rate * d.arrivals.coarse.width_s, rate]


def test_shares_of_the_lengths_sum_to_all_and_the_line_ends_at_all(d: Description) -> None:
    drawn = length_distributions(d).data
    for side in ("Prompts", "Outputs"):
        (outline,) = [trace for trace in drawn if trace.name == side]
        assert sum(outline.y[::2]) == pytest.approx(100)
    ups = [trace for trace in drawn if trace.line.shape == "hv"]
    assert [trace.y[-1] for trace in ups] == [100, 100]
    assert all(np.all(np.diff(trace.y) >= 0) for trace in ups)
    assert max(len(trace.y) for trace in ups) <= 402


def test_a_length_that_stands_out_is_named(d: Description) -> None:
    (marks,) = [trace for trace in length_distributions(d).data if trace.marker.color == ALARM]
    assert list(marks.text) == ["544"]
    assert marks.y[0] == pytest.approx(20, abs=3)


@pytest.mark.parametrize(
    "counted", [{7: 3}, {1: 1, 2: 5}, {1: 1, 10**6: 1}, dict.fromkeys(range(1, 200), 2), {0: 2, 50: 1}]
)
@pytest.mark.parametrize("log", [False, True])
def test_ranges_hold_every_length_once(counted: dict[int, int], log: bool) -> None:
    side = length_statistics(counted)
    edges = bin_edges(side, log=log)
    assert edges[0] <= side.least
    assert edges[-1] > side.most
    assert np.all(np.diff(edges) > 0)
    assert len(edges) <= BINS + 1
    held, _ = np.histogram(side.values, bins=edges, weights=side.counts)
    assert held.sum() == sum(counted.values())


def test_the_reuse_curve_is_that_of_the_description(d: Description) -> None:
    assert d.reuse is not None
    figure = reuse_by_capacity(d.reuse)
    for drawn, curve in zip(figure.data, (d.reuse.curve, d.reuse.first_to_last), strict=True):
        assert list(drawn.x) == [c for c in curve.capacities if c is not None]
        assert list(drawn.y) == [100 * hits / curve.references for hits in curve.hits[:-1]]
    (endless,) = figure.layout.shapes
    assert endless.y0 == 100 * d.reuse.curve.hits[-1] / d.reuse.curve.references


def test_the_page_has_the_words_the_tables_and_the_pictures(d: Description, tmp_path: Path) -> None:
    write_workload_report("a<b>.csv", d, tmp_path / "deep" / "workload.html", ["a note"])
    page = (tmp_path / "deep" / "workload.html").read_text(encoding="utf-8")
    assert "<h1>a&lt;b&gt;.csv</h1>" in page
    assert headline(d) in page
    assert "<td>clients</td><td>3: the first sends 33.4 %; 3 make 90 %</td>" in page
    assert all(f"<td>{label}</td>" in page for label, _ in facts(d))
    for table in (lengths_table(d), windows_table(d)):
        assert all(f"<td>{cell}</td>" in page for row in table.cells for cell in row)
    assert "a note" in page
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["plotly.min.js"]
    assert "https://cdn" not in page
    assert [f'id="{name}"' in page for name in ("arrivals", "lengths", "reuse")] == [True] * 3
    write_workload_report("a<b>.csv", d, tmp_path / "again.html", ["a note"])
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    assert (tmp_path / "plotly.min.js").is_file()


def test_a_trace_that_shares_nothing_and_one_request_have_a_page(tmp_path: Path) -> None:
    for requests in (traffic(1, shared=False), traffic(40, shared=False)):
        write_workload_report("x", describe(requests), tmp_path / "x.html")
        page = (tmp_path / "x.html").read_text(encoding="utf-8")
        assert 'id="reuse"' not in page
        assert "The trace tells of no prompt that begins as another does." in page
