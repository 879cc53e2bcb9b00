"""A whole plan over made-up runs whose answer, limit, cure and uncertain figure are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hbmtwin.sim.calibration import profile_of
from hbmtwin.sim.capacity.capacity_runs import CapacityRuns, drawn
from hbmtwin.sim.capacity.plan_capacity import PlanQuestion, check_question, plan_capacity, rule_of
from hbmtwin.sim.capacity.plan_words import sentences, verdict
from hbmtwin.sim.capacity.promise import Margin, parse_slos
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row

GIB = 1 << 30
KV_GIB = 20.1
Made = Callable[[Scenario, float], Row]
"""The row of a scenario, and of a number between 0 and 1 that its draw stands for."""


class MadeUpRuns(CapacityRuns):
    """Rows that a function makes; the same seed has the same luck in every scenario."""

    def __init__(self, made: Made) -> None:
        super().__init__(jobs=1)
        self.made, self.asked = made, 0

    def rows(self, runs: Sequence[tuple[Scenario, int]]) -> list[Row]:
        scenarios = [drawn(scenario, draw) for scenario, draw in runs]
        self.asked += len(scenarios)
        return [self.made(s, float(np.random.default_rng([s.seed, 1]).random())) for s in scenarios]

    @property
    def count(self) -> int:
        return self.asked


def kv_bound(s: Scenario, luck: float) -> Row:
    """Each user takes 0.25 GiB, a tenth more or less: 80 fit into 20.1 GiB for 52 % of the draws. INT8 halves it."""
    users = s.workload.users or 0
    each = (0.225 + 0.05 * luck) / (2 if s.kv_cache.dtype.startswith("int8") else 1)
    budget = KV_GIB + ((s.device.memory_bytes or 30 * GIB) - 30 * GIB) / GIB
    usage = users * each / budget
    row: Row = {
        **dict.fromkeys(ROW_COLUMNS),
        "outcome": "held" if usage <= 1 else "out_of_memory",
        "cause": None if usage <= 1 else "shortage",
        "capacity_bytes": 32 * GIB,
        "least_free_bytes": 3 * GIB,
        "kv_budget_bytes": round(budget * GIB),
        "kv_usage_peak": min(1.0, usage),
        "peak_reserved_bytes": 28 * GIB,
        "most_running": users,
        "preemptions": 0,
        "ttft_p99_s": 0.5,
        "tpot_p50_s": 0.02,
        "tpot_p99_s": 0.02,
    }
    return row


def compute_bound(s: Scenario, luck: float) -> Row:
    """Each user adds a millisecond to 20 of TPOT; reading KV is half of it."""
    profile = profile_of(s)
    efficiency = 0.5 if profile is None else profile.coefficients.get("kv_bandwidth_efficiency", (0.5,))[0]
    bandwidth = 1.0 if profile is None or "memory_bandwidth_bytes_per_s" not in profile.coefficients else 0.5
    if profile is not None and "peak_flops_per_s" not in profile.coefficients:
        bandwidth = 1.0
    users = s.workload.users or 0
    tpot = (0.020 + users * 0.001 * (0.5 + 0.5 * 0.5 / efficiency) * (0.95 + 0.1 * luck)) * bandwidth
    return {**kv_bound(s, luck), "outcome": "held", "cause": None, "kv_usage_peak": 0.5, "tpot_p99_s": tpot}


def scenario(**keys: Any) -> Scenario:
    flat = {key.replace("__", "."): value for key, value in keys.items()}
    policy = {"kv_cache.policy": "contiguous", "kv_cache.growth": "doubling", "kv_cache.tensors": "merged"}
    stop = {"kv_cache.copy_scope": "step", "memory.oom": "stop"}
    return Scenario.of({**policy, **stop, "workload.users": 8, "workload.num_prompts": 8, **flat})


def planned(made: Made, tmp_path: Path, question: PlanQuestion, **keys: Any) -> Any:
    return plan_capacity(scenario(**keys), question, MadeUpRuns(made), tmp_path)


QUICK = PlanQuestion(target="users", survive=0.5, margin=Margin(), explain=False)


def test_the_planted_answer_is_in_the_interval(tmp_path: Path) -> None:
    plan = planned(kv_bound, tmp_path, QUICK)
    assert plan.kind == "found"
    assert plan.answer <= 80 < plan.first_failing  # 52 % of the draws take at most 20.1 / 80 GiB
    assert plan.first_failing - plan.answer <= 12
    text = verdict(plan)
    assert text.startswith(f"{plan.answer} users, the most at which at least 50 % of runs hold")
    assert "95 %" in text


def test_more_runs_make_the_interval_narrower(tmp_path: Path) -> None:
    few = planned(kv_bound, tmp_path, QUICK)
    many = planned(kv_bound, tmp_path, replace(QUICK, seeds=400))
    assert many.answer <= 80 < many.first_failing
    assert many.first_failing - many.answer < few.first_failing - few.answer or many.first_failing - many.answer <= 2


def test_nothing_is_planned_whose_peak_leaves_less_than_the_margin(tmp_path: Path) -> None:
    plan = planned(kv_bound, tmp_path, replace(QUICK, margin=Margin(bytes=5 * GIB)))
    assert plan.kind == "nothing_holds"  # of the device 3 GiB are free whatever runs
    plan = planned(kv_bound, tmp_path, replace(QUICK, margin=Margin(bytes=2 * GIB)))
    assert plan.answer <= 72 < plan.first_failing
    assert plan.peak.kv_left_bytes >= 2 * GIB or plan.tried[-1].held < plan.tried[-1].trials


def share_bound(s: Scenario, luck: float) -> Row:
    """8 users hold 3.9 GiB; a share of 32 GiB gives all above 18 GiB to KV, and leaves the rest of the device."""
    share = s.engine.gpu_memory_utilization
    budget = max(0.1, 32 * share - 18)
    usage = (3.8 + 0.1 * luck) / budget
    return {
        **kv_bound(s, luck),
        "outcome": "held" if usage <= 1 else "out_of_memory",
        "cause": None if usage <= 1 else "shortage",
        "least_free_bytes": round((1 - share) * 32 * GIB),
        "kv_budget_bytes": round(budget * GIB),
        "kv_usage_peak": min(1.0, usage),
    }


SHARE = replace(QUICK, target="gpu_memory_utilization")


@pytest.mark.parametrize(
    ("margin_gib", "smallest", "largest"),
    [
        (0, 0.69, 0.98),  # 32 x 0.69 - 18 = 4.08
        (2, 0.75, 0.93),  # 32 x 0.75 - 18 - 3.9 = 2.1; 32 x 0.07 = 2.24
    ],
)
def test_a_share_leaves_the_margin_of_kv_at_its_smallest_and_of_the_device_at_its_largest(
    tmp_path: Path, margin_gib: int, smallest: float, largest: float
) -> None:
    plan = planned(share_bound, tmp_path, replace(SHARE, margin=Margin(bytes=margin_gib * GIB)))
    assert (plan.kind, plan.answer, plan.upper) == ("found", smallest, largest)
    assert min(plan.peak.kv_left_bytes, plan.peak.device_left_bytes) >= margin_gib * GIB


@pytest.mark.parametrize(("preset", "serves"), [("doubling", 0.97), ("paged", 0.69)])
def test_no_share_is_recommended_that_leaves_less_than_the_margin(tmp_path: Path, preset: str, serves: float) -> None:
    server = Scenario.load(overrides=["workload.users=8", "workload.num_prompts=8"], preset=preset)
    question = replace(SHARE, margin=Margin(bytes=10 * GIB - GIB * (preset == "doubling")), explain=True)
    plan = plan_capacity(server, question, MadeUpRuns(share_bound), tmp_path)
    assert (plan.kind, plan.answer, plan.serves) == ("nothing_holds", None, serves)
    assert f"nothing holds: {serves}, the smallest that serves the traffic, leaves " in verdict(plan)
    assert plan.to_dict()["serves"] == serves


def test_a_pool_that_leaves_less_than_the_margin_is_to_be_made_smaller(tmp_path: Path) -> None:
    server = Scenario.load(overrides=["workload.users=8", "workload.num_prompts=8"], preset="paged")
    question = replace(QUICK, margin=Margin(share=0.2), explain=True)
    plan = plan_capacity(server, question, MadeUpRuns(share_bound), tmp_path)
    assert "even at 1 user 0 of 9 did: 9 left less than the margin" in verdict(plan)
    assert plan.binding.constraint == "gpu_memory_utilization"
    best = plan.changes[0]
    assert (best.name, best.keys) == ("less of the device", {"engine.gpu_memory_utilization": 0.8})
    assert best.held == best.trials


def test_a_quick_plan_also_says_why_nothing_holds(tmp_path: Path) -> None:
    plan = planned(kv_bound, tmp_path, replace(QUICK, margin=Margin(bytes=5 * GIB)))
    assert plan.binding is None
    assert "even at 1 user 0 of 9 did: 9 left less than the margin" in verdict(plan)


def test_a_margin_as_large_as_the_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"--margin 29\.5 GiB: the device has 29\.50 GiB"):
        planned(kv_bound, tmp_path, replace(QUICK, margin=Margin(bytes=59 * GIB // 2)))


def test_memory_binds_and_its_cures_carry_farther(tmp_path: Path) -> None:
    plan = planned(kv_bound, tmp_path, replace(QUICK, explain=True))
    assert plan.binding.constraint == "KV"
    assert set(plan.binding.causes) == {"shortage"}
    relaxed = {r.constraint: r.held for r in plan.binding.relaxed}
    assert relaxed["KV"] == 8 > relaxed["compute"]
    best = plan.changes[0]
    assert best.name == "INT8 KV"
    assert 130 <= best.carries_to <= 180
    assert plan.one_more.kv_bytes == pytest.approx(0.25 * GIB, rel=0.1)
    assert plan.one_more.tpot_p99_s == 0
    told = dict(sentences(plan))
    assert told["binding"].startswith("KV: at ")
    assert "INT8 KV carries to" in told["next"]


def test_compute_binds_and_the_planted_figure_is_what_it_leans_on(tmp_path: Path) -> None:
    question = replace(QUICK, slos=parse_slos("tpot_p99=80ms"), explain=True)
    plan = planned(compute_bound, tmp_path, question)
    assert plan.answer <= 60 < plan.first_failing
    assert plan.binding.constraint == "compute"
    assert plan.binding.broken == {"tpot_p99": plan.binding.broken["tpot_p99"]}
    most = plan.leaning.most
    assert most.assumption.name == "kv_bandwidth_efficiency"
    assert not most.assumption.calibrated
    assert most.low < plan.leaning.answer < most.high
    assert "kv_bandwidth_efficiency" in dict(sentences(plan))["leans on"]
    assert "default, uncalibrated" in dict(sentences(plan))["leans on"]
    assert plan.one_more.tpot_p99_s == pytest.approx(0.001, rel=0.15)


def test_an_slo_that_no_load_meets_says_the_best(tmp_path: Path) -> None:
    plan = planned(compute_bound, tmp_path, replace(QUICK, slos=parse_slos("tpot_p99=5ms")))
    assert plan.kind == "nothing_holds"
    assert plan.answer is None
    assert "even at 1 user 0 of 9 did" in verdict(plan)
    assert "tpot_p99 21" in verdict(plan)
    assert "tpot_p99 <= 5 ms" in verdict(plan)


def test_what_no_load_breaks_is_no_answer(tmp_path: Path) -> None:
    plan = planned(lambda s, luck: {**kv_bound(s, luck), "outcome": "held", "kv_usage_peak": 0.1}, tmp_path, QUICK)
    assert plan.kind == "unbounded"
    assert plan.first_failing is None
    assert "no answer, but a bound from below" in verdict(plan)


def test_a_hole_is_told(tmp_path: Path) -> None:
    def holed(s: Scenario, luck: float) -> Row:
        users = s.workload.users or 0
        died = 15 <= users <= 25 or users > 60
        return {**kv_bound(s, luck), "outcome": "out_of_memory" if died else "held", "cause": "shortage"}

    plan = planned(holed, tmp_path, QUICK, workload__users=50)
    assert plan.answer < 15 <= plan.first_failing <= 25
    assert "more load is not always worse here" in dict(sentences(plan))["order"]


def test_a_trace_is_decided_by_one_run(tmp_path: Path) -> None:
    def rated(s: Scenario, luck: float) -> Row:
        return {**kv_bound(s, luck), "outcome": "held" if s.workload.time_scale >= 0.5 else "out_of_memory"}

    server = scenario().model_copy(update={"workload": Scenario.of({"workload.trace": "t.csv"}).workload})
    plan = plan_capacity(server, replace(QUICK, target=None), MadeUpRuns(rated), tmp_path)
    assert plan.answer == 2.0
    assert not plan.chance
    assert plan.to_dict()["confidence"] is None
    assert "no chance in it" in verdict(plan)


def test_a_rate_is_raised_by_about_a_tenth_to_say_what_more_costs(tmp_path: Path) -> None:
    def rated(s: Scenario, luck: float) -> Row:
        rate = s.workload.request_rate or 0
        return {**kv_bound(s, luck), "outcome": "held" if rate < 0.2 else "rejected", "kv_usage_peak": rate}

    server = Scenario.of({"workload.request_rate": 0.1, "workload.num_prompts": 40})
    plan = plan_capacity(server, replace(QUICK, target=None), MadeUpRuns(rated), tmp_path)
    assert plan.answer == 0.198
    assert plan.one_more.by == 0.01
    assert plan.one_more.kv_bytes == pytest.approx(0.01 * KV_GIB * GIB, rel=0.01)
    assert dict(sentences(plan))["one more"].startswith("0.01 sessions a second more takes 0.20 GiB of KV")


def test_requests_that_are_too_long_are_told(tmp_path: Path) -> None:
    def short(s: Scenario, luck: float) -> Row:
        length = s.engine.max_model_len or 0
        refused = {"requests_total": 40, "requests_rejected": 20 if length < 2048 else 0}
        return {**kv_bound(s, luck), **refused, "outcome": "held" if length < 1500 else "out_of_memory"}

    plan = planned(short, tmp_path, replace(QUICK, target="max_model_len"))
    assert plan.answer == 1408
    assert dict(sentences(plan))["refused"].startswith("up to 20 of the 40 requests of a run are longer")
    assert plan.to_dict()["peak"]["refused"] == 20


def test_devices_of_which_the_scenario_has_fewer_than_the_answer(tmp_path: Path) -> None:
    """Between two devices there is an all-reduce that one has not: its time is an uncertain figure of the answer."""

    def divided(s: Scenario, luck: float) -> Row:
        return {**compute_bound(s, luck), "tpot_p99_s": 0.05 / s.engine.tensor_parallel_size}

    question = replace(QUICK, target="devices", slos=parse_slos("tpot_p99=30ms"), explain=True)
    plan = planned(divided, tmp_path, question)
    assert (plan.answer, plan.first_failing) == (2, 1)
    assert "allreduce_ns" in {a.name for a in plan.leaning.still}


def test_the_same_question_has_the_same_bytes(tmp_path: Path) -> None:
    first, second = (planned(kv_bound, tmp_path, QUICK).to_dict() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (PlanQuestion(survive=1.0), "no number of runs shows that all would hold"),
        (PlanQuestion(survive=0.0), "a share of the runs"),
        (PlanQuestion(confidence=1.0), "no number of runs makes sure"),
        (PlanQuestion(seeds=106), "at least 107"),
        (PlanQuestion(seeds=0), "--seeds 0: at least 1"),
        (PlanQuestion(survive=0.5, seeds=10**20), "at most 20,000"),
        (PlanQuestion(survive=0.9999), "--survive 0.9999: 20,000 runs of which none fails do not show"),
        (PlanQuestion(survive=1 - 2**-53), "--survive 1: 20,000 runs"),
        (PlanQuestion(max_preemptions=-1), "--max-preemptions -1"),
    ],
)
def test_questions_that_make_no_sense(question: PlanQuestion, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        check_question(question)


def test_how_many_runs_a_yes_takes() -> None:
    assert rule_of(PlanQuestion()).least_for_yes == 119
    assert rule_of(PlanQuestion(survive=0.99)).least_for_yes > 500
