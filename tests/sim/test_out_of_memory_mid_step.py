"""Contiguous buffers that find no memory in the middle of a step: who gives way, what is undone, and that it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.kernels.records import BatchShape
from hbmtwin.sim.engine import Engine
from hbmtwin.sim.forward import Forward
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Fail, Failed, Plan, QueueScheduler


class Failure(NamedTuple):
    """A step that could not be carried out, by ids."""

    running: list[int]
    admitted: list[int]
    owner: int
    rejected: list[int]
    preempted: list[int]


class Livelock(AssertionError):
    """More steps fail than can while there is progress."""


class Log:
    """Every failure and every step of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: list[Failure] = []
        self.steps = 0
        self.most_failures = 10**9
        fail, step = QueueScheduler.fail, Forward.step

        def noted(scheduler: QueueScheduler, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
            running = [entry.sequence.id for entry in scheduler._running]
            failed = fail(scheduler, p, kv, owner, how)
            self.failures.append(
                Failure(
                    running,
                    [a.request.id for a in p.admitted],
                    owner,
                    [u.request.id for u in failed.rejected],
                    [u.request.id for u in failed.preempted],
                )
            )
            if len(self.failures) > self.most_failures:
                raise Livelock(f"{len(self.failures)} steps have failed")
            return failed

        def counted(forward: Forward, kv: KVPolicy, batch: BatchShape) -> None:
            self.steps += 1
            step(forward, kv, batch)

        monkeypatch.setattr(QueueScheduler, "fail", noted)
        monkeypatch.setattr(Forward, "step", counted)

    def run(self, scenario: Scenario, *, step_mode: bool = False) -> tuple[Twin, Result]:
        """Run it with an empty log, and with a bound on what may fail: between two ends no more than run at once."""
        self.failures.clear()
        self.steps = 0
        twin = Twin(scenario)
        total = (scenario.workload.num_prompts or 0) + 1
        self.most_failures = total * scenario.scheduler.max_num_seqs
        return twin, twin.run(step_mode=step_mode)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def tight(*overrides: str) -> Scenario:
    """Doubling buffers of Llama-2-7B in 2.05 GiB: a sequence of up to 512 tokens takes 256 MiB, then 512."""
    return Scenario.load(
        preset="doubling",
        overrides=[
            "engine.max_model_len=1024",
            "engine.gpu_memory_utilization=0.5",
            "scheduler.max_num_seqs=8",
            "memory.activation_bytes=0",
            "workload.num_prompts=4",
            "workload.prompt_tokens=500",
            "workload.output_tokens=30",
            "workload.request_rate=inf",
            "workload.system_prompt_tokens=0",
            "session.turns=1",
            *overrides,
        ],
    )


def column(result: Result, name: str) -> dict[int, Any]:
    """A column of the requests, by id."""
    return dict(zip(result.requests["id"].tolist(), result.requests[name].tolist(), strict=True))


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_the_last_admitted_is_preempted_until_the_others_can_grow(log: Log) -> None:
    """Four buffers of 256 MiB are full at once: two can become 512 MiB beside all old copies, a third not."""
    _, result = log.run(tight("memory.oom=preempt"))
    assert log.failures == [
        Failure([0, 1, 2, 3], [], 2, [], [3]),
        Failure([0, 1, 2], [], 2, [], [2]),
    ]
    assert column(result, "status") == dict.fromkeys(range(4), "completed")
    assert column(result, "preemptions") == {0: 0, 1: 0, 2: 1, 3: 1}
    assert column(result, "output_tokens") == dict.fromkeys(range(4), 30)
    assert result.summary["preemptions"] == 2
    ends = column(result, "end_ns")
    assert ends[0] == ends[1] < ends[2] == ends[3]  # nobody came back while the two were there
    assert result.timeline["preemptions"].tolist() == sorted(result.timeline["preemptions"])


def test_the_one_that_asked_is_rejected(log: Log) -> None:
    _, result = log.run(tight("memory.oom=reject"))
    assert [(f.owner, f.rejected, f.preempted) for f in log.failures] == [(2, [2], []), (3, [3], [])]
    assert column(result, "status") == {0: "completed", 1: "completed", 2: "rejected", 3: "rejected"}
    assert column(result, "reason") == {0: "", 1: "", 2: "out_of_memory", 3: "out_of_memory"}
    assert column(result, "output_tokens") == {0: 30, 1: 30, 2: 13, 3: 13}  # what they had got: up to the 513th token
    assert column(result, "scheduled_ns") == dict.fromkeys(range(4), 0)
    assert result.summary["preemptions"] == 0


def test_newcomers_are_undone_and_nobody_else_gives_way(log: Log) -> None:
    """Eight prompts of 1,000 tokens, 512 MiB each, of which four fit; one less comes each time until they do."""
    many = tight(
        "memory.oom=reject",
        "workload.num_prompts=8",
        "workload.prompt_tokens=1000",
        "workload.output_tokens=4",
        "scheduler.max_num_batched_tokens=8192",
    )
    twin, result = log.run(many)
    assert log.failures == [Failure([*range(n)], [*range(n)], 4, [], []) for n in (8, 7, 6, 5)]
    assert set(column(result, "status").values()) == {"completed"}
    began, ends = column(result, "scheduled_ns"), column(result, "end_ns")
    assert began[0] == began[1] == began[2] == began[3] == 1_800_000, "the steps that failed had taken time"
    assert began[4] == began[5] == began[6] == began[7] == ends[0], "the others came when the first had gone"
    assert result.summary["preemptions"] == 0
    assert twin.kv.usage().held == 0


def test_one_that_is_alone_and_cannot_grow_is_rejected(log: Log) -> None:
    """In 647 MiB a buffer of 256 MiB cannot become one of 512. The other comes back with 513 tokens, to a buffer of
    512 MiB at once, and needs no copy."""
    _, result = log.run(tight("memory.oom=preempt", "engine.gpu_memory_utilization=0.452", "workload.num_prompts=2"))
    assert log.failures == [Failure([0, 1], [], 0, [], [1]), Failure([0], [], 0, [0], [])]
    assert column(result, "status") == {0: "rejected", 1: "completed"}
    assert column(result, "preemptions") == {0: 0, 1: 1}
    assert column(result, "output_tokens") == {0: 13, 1: 30}


# -- whatever the traffic ----------------------------------------------------------------------------------------------

STEP_SCOPE = ("kv_cache.copy_scope=step",)
KINDS = [
    ("kv_cache.growth=doubling", *STEP_SCOPE),
    ("kv_cache.growth=doubling", "kv_cache.tensors=per_layer", *STEP_SCOPE),
    ("kv_cache.growth=exact", "kv_cache.tensors=merged", *STEP_SCOPE),
    ("kv_cache.growth=step", "kv_cache.step_tokens=100", "kv_cache.tensors=merged", *STEP_SCOPE),
    ("kv_cache.growth=hybrid", "kv_cache.tensors=per_layer", *STEP_SCOPE),
    ("kv_cache.growth=static", "kv_cache.copy_scope=tensor", "kv_cache.tensors=per_layer"),
    ("kv_cache.growth=static", "kv_cache.copy_scope=step"),
    ("kv_cache.growth=doubling", "kv_cache.retention=sink_recent(4, 200)", *STEP_SCOPE),
]


def scenarios() -> st.SearchStrategy[Scenario]:
    """Conversations on memory for one longest request, or for a few."""

    def build(
        seed: int,
        kind: tuple[str, ...],
        oom: str,
        utilization: int,
        rate: float,
        prompt: int,
        output: int,
        turns: int,
        keep: bool,
        seqs: int,
        batched: int,
        activations: str,
    ) -> Scenario:
        overrides = [
            "engine.max_model_len=1024",
            f"engine.gpu_memory_utilization={utilization / 1000}",
            f"scheduler.max_num_seqs={seqs}",
            f"scheduler.max_num_batched_tokens={batched}",
            "workload.num_prompts=12",
            f"workload.request_rate={rate}",
            f'workload.prompt_tokens={{distribution="uniform",low=1,high={prompt}}}',
            f'workload.output_tokens={{distribution="uniform",low=1,high={output}}}',
            "workload.system_prompt_tokens=3",
            f"session.turns={turns}",
            "session.think_time_s=0.3",
            f"session.between_turns={'keep' if keep else 'drop'}",
            "results.interval_s=0.2",
            "results.steps=true",
            f"memory.activations={activations}",
            f"memory.oom={oom}",
            *kind,
        ]
        return Scenario.load(preset="doubling", seed=seed, overrides=overrides)

    return st.builds(
        build,
        seed=st.integers(0, 2**32),
        kind=st.sampled_from(KINDS),
        oom=st.sampled_from(["reject", "preempt"]),
        utilization=st.integers(465, 500),
        rate=st.sampled_from([0.5, 5.0, 50.0]),
        prompt=st.sampled_from([50, 300, 600]),
        output=st.sampled_from([10, 120]),
        turns=st.integers(1, 3),
        keep=st.booleans(),
        seqs=st.sampled_from([2, 5, 16]),
        batched=st.sampled_from([200, 2048]),
        activations=st.sampled_from(["none", "none", "peak"]),
    )


def each_scenario(test: Callable[[Scenario], None], max_examples: int) -> None:
    """Run *test* on so many scenarios."""
    settings(max_examples=max_examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])(
        given(scenarios())(test)
    )()


def check_the_end(log: Log, twin: Twin, result: Result) -> None:
    """Everybody has an answer, everything is counted, and nothing is left."""
    requests, last = result.requests, result.timeline.iloc[-1]
    assert set(requests["status"]) <= {"completed", "rejected"}
    assert set(requests.loc[requests["status"] == "rejected", "reason"]) <= {"out_of_memory", "max_model_len"}
    assert (requests["reason"] == "out_of_memory").sum() == sum(len(f.rejected) for f in log.failures)
    for name in ("running", "waiting", "parked", "kv_tokens", "kv_parked", "kv_unfilled", "growth_copy"):
        assert last[name] == 0, name
    assert twin.kv.usage().held == 0
    assert result.timeline["activations"].iloc[-1] == result.timeline["activations"].iloc[0]
    preempted = [id for f in log.failures for id in f.preempted]
    assert column(result, "preemptions") == {id: preempted.count(id) for id in requests["id"].tolist()}
    assert result.summary["preemptions"] == last["preemptions"] == len(preempted)


def check_that_undone_admissions_left_no_trace(result: Result) -> None:
    """When a request began, and what it found, is told by the first step with it that was carried out."""
    assert result.steps is not None
    began: dict[int, int] = {}
    found: dict[int, int] = {}
    for step in result.steps.to_dict("records"):
        for id, context in zip(step["seq_ids"], step["context_tokens"], strict=True):
            began.setdefault(id, step["start_ns"])
            found.setdefault(id, context)
    ids = result.requests["id"].tolist()
    assert column(result, "scheduled_ns") == {id: began.get(id, -1) for id in ids}
    assert column(result, "cached_tokens") == {id: found.get(id, 0) for id in ids}
    last = result.timeline.iloc[-1]
    assert last["hit_tokens"] == sum(found.values())
    prompts = column(result, "prompt_tokens")
    assert last["queried_tokens"] == sum(prompts[id] for id in began)


def check_progress(log: Log, twin: Twin, result: Result) -> None:
    """Every step that is carried out computes tokens that somebody needs, and few fail (see :class:`Log`)."""
    r = result.requests
    needed = (r["prompt_tokens"] + r["output_tokens"]) * (1 + r["preemptions"])
    assert log.steps - len(log.failures) <= needed.sum()
    for failure in log.failures:
        assert failure.owner in failure.running
        alone = len(failure.running) == 1
        undone = bool(failure.admitted) and not alone
        gave_way = failure.rejected + failure.preempted
        assert len(gave_way) == (0 if undone else 1)
        if alone:
            assert failure.rejected == [failure.owner]
        elif not undone and twin.scenario.memory.oom == "preempt":
            assert failure.preempted == [failure.running[-1]]


def test_every_request_ends_and_undone_steps_leave_no_trace(log: Log) -> None:
    failed = {"undone": 0, "preempted": 0, "rejected": 0}

    def ends(scenario: Scenario) -> None:
        twin, result = log.run(scenario, step_mode=True)
        check_the_end(log, twin, result)
        check_that_undone_admissions_left_no_trace(result)
        check_progress(log, twin, result)
        for f in log.failures:
            failed["rejected" if f.rejected else "preempted" if f.preempted else "undone"] += 1

    each_scenario(ends, 40)
    assert min(failed.values()) > 4, failed


def test_leaps_leave_the_rows_and_statistics_of_single_steps() -> None:
    def equal(scenario: Scenario) -> None:
        leaps, steps = Twin(scenario), Twin(scenario)
        a, b = leaps.run(), steps.run(step_mode=True)
        for name in ("timeline", "requests", "checkpoints"):
            assert getattr(a, name).equals(getattr(b, name)), name
        assert a.summary == b.summary
        assert leaps.general.stats() == steps.general.stats()

    each_scenario(equal, 30)


# -- planted bugs ------------------------------------------------------------------------------------------------------


def many_prompts(*overrides: str) -> Scenario:
    return tight(
        "memory.oom=preempt",
        "workload.num_prompts=8",
        "workload.prompt_tokens=600",
        "scheduler.max_num_batched_tokens=8192",
        "results.steps=true",
        *overrides,
    )


def test_an_admission_that_is_noted_before_its_step_is_carried_out_is_caught(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, result = log.run(many_prompts())
    check_that_undone_admissions_left_no_trace(result)
    honest = Engine._note_changes

    def early(self: Engine, plan: Plan, now: int) -> None:
        honest(self, plan, now)
        self._note_admitted(plan, now)

    monkeypatch.setattr(Engine, "_note_changes", early)
    _, result = log.run(many_prompts())
    with pytest.raises(AssertionError):
        check_that_undone_admissions_left_no_trace(result)


def test_a_scheduler_that_admits_again_whom_it_undid_is_caught(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = QueueScheduler.fail

    def forgets(self: QueueScheduler, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        failed = noted(self, p, kv, owner, how)
        self._most_running = self.config.max_num_seqs
        return failed

    monkeypatch.setattr(QueueScheduler, "fail", forgets)
    with pytest.raises(Livelock):
        log.run(many_prompts())


def test_activations_that_an_undone_step_keeps_are_caught(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = many_prompts("memory.activations=peak")
    twin, result = log.run(scenario)
    check_the_end(log, twin, result)
    honest = Forward.abort

    def keeps(self: Forward) -> None:
        if log.steps % 2:
            honest(self)
        else:
            self._live.clear()

    monkeypatch.setattr(Forward, "abort", keeps)
    twin, result = log.run(scenario)
    with pytest.raises(AssertionError):
        check_the_end(log, twin, result)


def test_a_preemption_that_is_not_counted_is_caught(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def uncounted(self: Engine, plan: Plan, owner: int, how: Fail) -> None:
        for u in self.scheduler.fail(plan, self.kv, owner, how).rejected:
            raise AssertionError(f"{u.request.id} is not rejected in this scenario")
        self._batches.forget()
        self._row(int(self.env.now), self._entry_at())

    twin, result = log.run(tight("memory.oom=preempt"))
    check_the_end(log, twin, result)
    monkeypatch.setattr(Engine, "_give_way", uncounted)
    twin, result = log.run(tight("memory.oom=preempt"))
    with pytest.raises(AssertionError):
        check_the_end(log, twin, result)
