"""Pictures and words of OOM points: what they say is what was found, and the same answers are the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.dashboard.oom_point_figure import cause_shares, memory_by_load_figure, share_by_load, share_by_place
from hbmtwin.dashboard.oom_point_page import write_oom_point_page
from hbmtwin.dashboard.oom_point_words import memory_plan, memory_rows, plan, rows, sentences
from hbmtwin.sim.capacity.oom_point import CriticalLoad, OomPoint
from hbmtwin.sim.capacity.oom_point_draws import Draw
from hbmtwin.sim.capacity.oom_point_loads import Load
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.capacity.smallest_memory import SmallestMemory
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS

GIB = 2**30


def row(policy: str, load: float, cause: str | None, turn: int = 0) -> dict[str, Any]:
    asked = {"policy": policy, "draw": "seed 0", "load": load, "memory_bytes": None}
    died = {"died_users": load, "died_turn": turn, "died_at_s": 10 / load, "died_operations": 100 * load}
    end = {"outcome": "out_of_memory", "cause": cause, **died} if cause else {"outcome": "held"}
    preempted = {"preemptions": 3, "recomputed_share": 0.25, "thrashing_minutes": 2, "first_preemption_s": 4.0}
    return {**asked, **dict.fromkeys(ROW_COLUMNS), "key": f"{policy}{load}{cause}", **preempted, **end}


def critical(policy: str, end: End, draw: int, load: float | None, cause: str | None = None) -> CriticalLoad:
    return CriticalLoad(policy, end, draw, load, True, None if load is None else row(policy, load, cause, draw))


POINT = OomPoint(
    scenario=Scenario(),
    load=Load("users", (2, 4, 8, 16)),
    draws=tuple(Draw(f"seed {seed}", {"seed": seed}) for seed in range(3)),
    varies="3 seeds",
    ends={"doubling": ("fails",), "paged": ("fails", "preempts")},
    left_out={},
    critical=(
        critical("doubling", "fails", 0, 4, "growth_copy"),
        critical("doubling", "fails", 1, 8, "growth_copy"),
        critical("doubling", "fails", 2, 16, "shortage"),
        *(critical("paged", "fails", draw, None) for draw in range(3)),
        critical("paged", "preempts", 0, 16),
        critical("paged", "preempts", 1, 16),
        critical("paged", "preempts", 2, None),
    ),
    smallest=tuple(
        SmallestMemory(policy, end, draw, load, size * GIB + draw * GIB // 2, True)
        for policy, end, sizes in (
            ("doubling", "fails", (20, 40)),
            ("paged", "fails", (18, 22)),
            ("paged", "preempts", (18, 26)),
        )
        for load, size in zip((2, 16), sizes, strict=True)
        for draw in range(3)
    ),
    runs=(row("doubling", 16, "shortage"), row("paged", 16, None)),
)


def test_what_a_planner_takes_from_it() -> None:
    assert plan(POINT) == (
        "Memory suffices in all 3 draws: doubling up to 2, paged up to 16, the largest asked for (without preempting "
        "up to 8) (users)."
    )
    assert memory_plan(POINT) == (
        "The smallest device memory (GiB) on which every draw is served, from 2 to 16 users: doubling 21.00 to 41.00; "
        "paged 19.00 to 23.00; paged, without preempting 19.00 to 27.00."
    )


def test_a_sentence_says_where_it_comes_first_for_half_and_for_all() -> None:
    said = sentences(POINT)
    assert said[2] == (
        "doubling runs out of memory first at 4 users, in half of the draws at 8, in all at 16; at 2 in none (0 of 3: "
        "with 95% confidence in fewer than 71%). Causes: growth_copy 2, shortage 1."
    )
    assert said[3] == "paged never runs out of memory up to 16 users (0 of 3: with 95% confidence in fewer than 71%)."
    assert said[4].startswith("paged preempts first at 16 users, in 2 of 3 up to 16; at 8 in none (0 of 3: ")
    assert said[4].endswith(
        "computes up to 25.0 % of its tokens twice, and thrashes in 2 of its minutes over all draws."
    )


def test_rows_of_the_tables() -> None:
    assert rows(POINT) == [
        ("doubling", "runs out", "3 of 3", "4 to 16", "growth_copy 2, shortage 1", "8", "2", "1.25", "800"),
        ("paged", "runs out", "0 of 3", "–", "–", "–", "–", "–", "–"),
        ("paged", "preempts", "2 of 3", "16", "–", "–", "–", "4", "–"),
    ]
    assert memory_rows(POINT)[1] == ("16", "40.50 (40.00 – 41.00)", "22.50 (22.00 – 23.00)", "26.50 (26.00 – 27.00)")


def test_what_is_not_one_edge_is_told() -> None:
    torn = [c._replace(monotone=False) if c.draw == 1 and c.policy == "doubling" else c for c in POINT.critical]
    assert sentences(replace(POINT, critical=tuple(torn)))[-1].startswith("Not monotone: 1 of 9 draws hold at a larger")


def test_curves_have_their_bands_and_the_others_behind_them() -> None:
    figure = share_by_load(POINT)
    lines = [t for t in figure.data if t.fill is None]
    assert [tuple(t.y) for t in lines if t.name == "doubling" and t.line.width == 2.5] == [
        pytest.approx((0, 100 / 3, 200 / 3, 100))
    ]
    assert sum(t.line.width == 1.5 for t in lines) == 2
    assert [t.line.dash for t in lines if t.name == "paged, preempts"] == ["dot"]
    (band,) = [t for t in figure.data if t.fill == "toself" and t.legendgroup == "doubling"]
    assert (band.x[0], max(band.x), len(band.x)) == (2, 16, 14)
    assert max(band.y) == 100
    titles = [a.text for a in figure.layout.annotations]
    assert titles == [
        "<b>doubling</b><br>first at 4, all at 16",
        "<b>paged</b><br>runs out: never up to 16<br>preempts (dotted):<br>first at 16, 2 of 3 by 16",
    ]


def test_causes_and_what_held_fill_each_bar() -> None:
    bars = {bar.name: dict(zip(bar.y, bar.x, strict=True)) for bar in cause_shares(POINT).data}
    assert bars == {
        "growth copy": {"paged": 0, "doubling": 2},
        "shortage": {"paged": 0, "doubling": 1},
        "held up to 16": {"paged": 3, "doubling": 0},
    }


def test_a_place_in_which_deaths_differ_has_a_panel() -> None:
    names = [axis.title.text for axis in (share_by_place(POINT).layout[f"xaxis{n}"] for n in ("", 2, 3, 4))]
    assert names == [
        "users in the server",
        "turn of the request that asked",
        "simulated time (s)",
        "allocator operations",
    ]


def test_memories_have_the_device_beside_them() -> None:
    figure = memory_by_load_figure(POINT)
    (line,) = [t for t in figure.data if t.name == "<b>paged</b>, never preempts" and t.fill is None]
    assert tuple(line.y) == (18.5, 26.5)
    assert figure.layout.annotations[0].text == "ascend-910b4: 29.5 GiB"


def test_a_page_is_the_same_bytes_twice_and_says_what_it_drew(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_oom_point_page(POINT, tmp_path / name)
    one, two = ((tmp_path / name / "report.html").read_text(encoding="utf-8") for name in ("one", "two"))
    assert one == two
    assert "$" not in one.split("<script")[0]
    assert "<h2>The smallest memory that survives</h2>" in one
    assert "95% confidence" in one
    write_oom_point_page(replace(POINT, smallest=()), tmp_path / "two")
    assert "smallest memory" not in (tmp_path / "two" / "report.html").read_text(encoding="utf-8")
