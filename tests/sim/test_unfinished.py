"""Why requests were never sent: by rows that say so, and by what is missing."""

from __future__ import annotations

import pandas as pd
import pytest

from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.unfinished import AFTER_EITHER, AFTER_FAILURE, AFTER_REJECTION, NOT_SENT, unfinished_because


@pytest.mark.parametrize(
    ("statuses", "total", "reasons"),
    [
        ([], 0, {}),
        (["completed"] * 3, 3, {}),
        (["completed"] * 3, None, {}),
        (["completed", "rejected"], 5, {AFTER_REJECTION: 3}),
        (["completed", "failed", "unfinished"], 5, {NOT_SENT: 1, AFTER_FAILURE: 2}),
        (["rejected", "failed"], 3, {AFTER_EITHER: 1}),
        (["unfinished"] * 4, None, {NOT_SENT: 4}),
    ],
)
def test_the_reasons_of_a_table(statuses: list[str], total: int | None, reasons: dict[str, int]) -> None:
    assert unfinished_because(pd.DataFrame({"status": pd.Series(statuses, dtype="str")}), total) == reasons


def test_turns_after_a_rejected_one_are_told_so() -> None:
    """Four turns of 1,400 tokens: the third has no room in 4,096 with its history, and the fourth never comes."""
    scenario = Scenario.load(
        overrides=[
            *("workload.prompt_tokens=1300", "workload.output_tokens=100", "workload.system_prompt_tokens=0"),
            *("session.turns=4", "workload.num_prompts=8", "session.think_time_s=1"),
        ]
    )
    s = Twin(scenario).run().summary
    assert (s["requests_completed"], s["requests_rejected"]) == (4, {"max_model_len": 2})
    assert s["unfinished_because"] == {"an earlier turn of their session was rejected": 2}
