"""Goodput by hand: who met which objective, of whom, and how many a second."""

from __future__ import annotations

import pandas as pd
import pytest

from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sections import SloSection
from hbmtwin.sim.slo import goodput, objectives


def requests(*rows: tuple[float, float, float, int, str]) -> pd.DataFrame:
    """``(arrival, first token, end)`` in seconds, output tokens, status."""
    frame = pd.DataFrame(rows, columns=["arrival_ns", "first_token_ns", "end_ns", "output_tokens", "status"])
    times = ["arrival_ns", "first_token_ns", "end_ns"]
    return frame.assign(**{name: (frame[name] * 1e9).round().astype("int64") for name in times})


FIVE = requests(
    (0, 1, 3, 5, "completed"),  # TTFT 1, TPOT 0.5, end to end 3: everything, exactly
    (1, 3, 4, 5, "completed"),  # TTFT 2: too late
    (2, 2.5, 5.5, 4, "completed"),  # TPOT 1: too slow, and end to end 3.5 too long
    (3, 4, 4, 1, "completed"),  # one token has no TPOT: met
    (3, 3.5, 9, 2, "failed"),  # died with the server
)
ALL = SloSection(ttft_s=1.0, tpot_s=0.5, e2e_s=3.0)


def test_goodput_by_hand() -> None:
    assert goodput(FIVE, ALL, 6, 10.0) == {
        "requests_met": 2,
        "requests_per_s": 0.2,
        "share_met": 2 / 6,  # a later turn was never made, and counts
        "share_met_by_slo": {"ttft_s": 3 / 6, "tpot_s": 3 / 6, "e2e_s": 3 / 6},
        "attained": False,
    }


def test_only_what_is_given_counts() -> None:
    found = goodput(FIVE, SloSection(ttft_s=2.0), 5, 10.0)
    assert found is not None
    assert (found["requests_met"], found["share_met"], found["share_met_by_slo"]) == (4, 0.8, {"ttft_s": 0.8})
    assert goodput(FIVE, SloSection(), 5, 10.0) is None
    assert objectives(SloSection(e2e_s=2.0, ttft_s=1.0)) == {"ttft_s": 1.0, "e2e_s": 2.0}


@pytest.mark.parametrize(("attainment", "attained"), [(0.79, True), (0.8, True), (0.81, False)])
def test_the_share_wanted_is_attained_if_it_is_reached(attainment: float, attained: bool) -> None:
    found = goodput(FIVE, SloSection(ttft_s=2.0, attainment=attainment), 5, 10.0)
    assert found is not None
    assert found["attained"] is attained


def test_a_run_without_time_or_requests_has_no_rate_and_breaks_no_promise() -> None:
    found = goodput(FIVE[:0], ALL, 0, 0.0)
    assert found is not None
    assert (found["requests_met"], found["requests_per_s"], found["share_met"]) == (0, None, None)
    assert found["attained"]


def test_objectives_are_times() -> None:
    with pytest.raises(ScenarioError, match=r"slo\.ttft_s"):
        Scenario.load(overrides=["slo.ttft_s=0"])
    with pytest.raises(ScenarioError, match=r"slo\.e2el_s"):
        Scenario.load(overrides=["slo.e2el_s=1"])
    assert Scenario.load(overrides=["slo.tpot_s=0.05"]).slo.tpot_s == 0.05
