"""Requests beyond ``max_concurrency`` wait at the client: who is sent when, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
import pytest
import simpy

from hbmtwin.sim.client_limit import LimitedInbox
from hbmtwin.sim.legality import check
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.records import Request

from .legal_scenarios import TINY


def scenario(**keys: object) -> Scenario:
    base = {
        "model.name": str(TINY / "plain.json"),
        "device.name": "a100-80gb",
        "engine.max_model_len": 384,
        "workload.num_prompts": 120,
        "workload.prompt_tokens": {"distribution": "uniform", "low": 4, "high": 90},
        "workload.output_tokens": {"distribution": "uniform", "low": 1, "high": 60},
        "workload.system_prompt_tokens": 0,
        "session.turns": 1,
    }
    return Scenario.of(base | {key.replace("__", "."): value for key, value in keys.items()})


def requests_of(s: Scenario) -> pd.DataFrame:
    table = Twin(s).run().requests
    assert (table["status"] == "completed").all()
    return table.sort_values("id").reset_index(drop=True)


def assert_sent_as_a_semaphore_would(due: list[int], sent: list[int], ended: list[int], limit: int) -> None:
    """From the definition: in order of coming; at once where there is room, else when somebody leaves."""
    order = sorted(range(len(due)), key=lambda i: (due[i], i))
    assert [sent[i] for i in order] == sorted(sent)
    for i in order:
        inside = sum(sent[j] <= due[i] < ended[j] for j in order if j != i and (due[j], j) < (due[i], i))
        waiting = sum(sent[j] > due[i] for j in order if (due[j], j) < (due[i], i))
        if sent[i] == due[i]:
            assert inside < limit
            assert not waiting
        else:
            assert sent[i] in ended
            before = sorted([e for j, e in enumerate(ended) if (due[j], j) < (due[i], i)])
            # With `limit` slots, request k of the queue is sent when all but limit - 1 of those before it have left.
            assert sent[i] == before[len(before) - limit]


@pytest.mark.parametrize("limit", [1, 3, 16])
@pytest.mark.parametrize("rate", [30.0, 1000.0, float("inf")])
def test_who_finds_no_room_is_sent_when_somebody_leaves_in_the_order_of_coming(limit: int, rate: float) -> None:
    s = scenario(workload__request_rate=rate, workload__max_concurrency=limit)
    due = [r.arrival_ns for r in source_of(s).open()]
    table = requests_of(s)
    sent, ended = table["arrival_ns"].tolist(), table["end_ns"].tolist()
    assert_sent_as_a_semaphore_would(due, sent, ended, limit)
    assert sum(a > b for a, b in zip(sent, due, strict=True)) > 0 or rate < 100


def test_the_check_of_the_semaphore_sees_a_wrong_order_and_a_slot_too_many() -> None:
    due, sent, ended = [0, 0, 0, 0], [0, 0, 5, 7], [5, 7, 9, 9]
    assert_sent_as_a_semaphore_would(due, sent, ended, 2)
    with pytest.raises(AssertionError):
        assert_sent_as_a_semaphore_would(due, [0, 0, 7, 5], ended, 2)
    with pytest.raises(AssertionError):
        assert_sent_as_a_semaphore_would(due, [0, 0, 0, 5], ended, 2)
    with pytest.raises(AssertionError):
        assert_sent_as_a_semaphore_would(due, [0, 0, 6, 7], ended, 2)


def test_no_more_are_in_the_server_and_the_wait_is_no_part_of_ttft() -> None:
    rows = Twin(scenario(workload__request_rate=float("inf"), workload__max_concurrency=4)).run().timeline
    assert (rows["running"] + rows["waiting"]).max() == 4
    limited = requests_of(scenario(workload__request_rate=float("inf"), workload__max_concurrency=1))
    ttft = limited["first_token_ns"] - limited["arrival_ns"]
    assert ttft.max() < 10 * ttft.min()
    assert limited["arrival_ns"].tolist() == [0, *limited["end_ns"][:-1]]  # one at a time


def test_lengths_are_the_same_and_a_wide_limit_changes_nothing() -> None:
    plain = requests_of(scenario(workload__request_rate=1000.0))
    narrow, wide = (requests_of(scenario(workload__request_rate=1000.0, workload__max_concurrency=n)) for n in (2, 999))
    pd.testing.assert_frame_equal(plain, wide)
    columns = ["id", "session", "prompt_tokens", "output_tokens"]
    pd.testing.assert_frame_equal(plain[columns], narrow[columns])


def test_next_turns_wait_in_the_same_queue() -> None:
    s = scenario(workload__request_rate=500.0, workload__max_concurrency=2, session__turns=3, session__think_time_s=0)
    table = requests_of(s)
    assert len(table) == 120
    spans = sorted(zip(table["arrival_ns"], table["end_ns"], strict=True))
    for sent, _ in spans:
        assert sum(a <= sent < b for a, b in spans) <= 2
    assert table.groupby("session")["arrival_ns"].is_monotonic_increasing.all()
    # Everybody was due early, so that a session's next turn waited behind the first turns of others.
    assert table[table["turn"] == 1]["arrival_ns"].min() > table[table["turn"] == 0]["arrival_ns"].nsmallest(10).max()


def test_of_the_traffic_one_request_at_most_is_drawn_and_waits() -> None:
    drawn = []

    def traffic() -> Iterator[Request]:
        for i in range(100_000):
            drawn.append(i)
            yield Request(i, i, 0, 0, 1, 1, 1, ())

    sent: list[int] = []
    inbox = LimitedInbox(simpy.Environment(), traffic(), lambda r: sent.append(r.id), 3)
    inbox._env.run()
    assert (sent, len(drawn), list(inbox.to_come)) == ([0, 1, 2], 4, [3])
    for _ in range(5000):
        inbox.left()
    assert (sent, len(drawn), list(inbox.to_come)) == (list(range(5003)), 5004, [5003])


def test_who_waits_when_the_server_dies_was_never_sent() -> None:
    s = scenario(
        workload__request_rate=float("inf"),
        workload__max_concurrency=6,
        workload__num_prompts=30,
        kv_cache__block_size=16,
        kv_cache__options={"num_blocks": 25},
        memory__oom="stop",
    )
    table = Twin(s).run().requests
    assert sorted(table["id"]) == list(range(30))
    assert set(table["status"]) >= {"failed", "unfinished"}
    assert (table["status"] == "failed").sum() <= 6


def test_samples_come_together_and_are_not_let_in_one_by_one() -> None:
    keys = ["workload.samples=2", "workload.max_concurrency=3", "session.turns=1"]
    with pytest.raises(ScenarioError, match=r"^workload\.max_concurrency: 2 samples of a prompt come together"):
        check(Scenario.load(overrides=keys))
