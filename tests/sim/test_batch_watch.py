"""Whether a batch has changed: by numbers, against the ids of everybody in it, step by step of whole runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.allocators.records import KVSequence
from hbmtwin.sim.batch_watch import BatchWatch
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Plan

from .legal_scenarios import numbered

Ids = tuple[list[int], list[tuple[int, int]]]


def naive(plan: Plan) -> Ids:
    """Who computes one token, and how many the others compute."""
    everyone = [] if plan.group is None else [(id, 1) for id in plan.group.members]
    everyone += [(s.id, new) for s, new in plan.scheduled]
    return [id for id, new in everyone if new == 1], [(id, new) for id, new in everyone if new > 1]


class Watched(BatchWatch):
    """Fails at a step that it tells wrongly; counts how they were told."""

    told: Counter[str]

    def forget(self) -> None:
        super().forget()
        self.last: Ids | None = None

    def changed(self, plan: Plan) -> bool:
        same_group = plan.group is self._group
        answer, now = super().changed(plan), naive(plan)
        assert answer == (now != self.last), (now, self.last)
        self.last = now
        self.told[f"{'changed' if answer else 'alike'}, {'the same' if same_group else 'another'} group"] += 1
        return answer


def watch(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    told: Counter[str] = Counter()
    monkeypatch.setattr(Watched, "told", told, raising=False)
    monkeypatch.setattr("hbmtwin.sim.engine.BatchWatch", Watched)
    return told


@pytest.mark.parametrize("kind", ["paged", "v0", "windows", "radix", "contiguous"])
def test_each_step_of_a_run_is_told_as_its_ids_say(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = watch(monkeypatch)
    for seed in range(12):
        Twin(Scenario.of(numbered(seed, kind=kind))).run(step_mode=True)
    assert {"changed, the same group", "alike, the same group"} <= told.keys()
    if kind == "paged":  # a preemption breaks the group up; who was in it may go on as before
        assert told.keys() == {f"{how}, {of} group" for how in ("changed", "alike") for of in ("the same", "another")}


def sequence(id: int) -> KVSequence:
    return KVSequence(id, id, 0, num_tokens=9, max_tokens=99, num_computed_tokens=8)


def plan_of(group: DecodeGroup | None, *scheduled: tuple[KVSequence, int]) -> Plan:
    plan = Plan([])
    plan.group = group
    plan.scheduled += scheduled
    return plan


def test_plans_that_number_the_same_are_told_apart_by_their_ids() -> None:
    a, b, c, d = map(sequence, range(4))
    group, watch = DecodeGroup(), BatchWatch()
    for s in (a, b):
        group.join(s, final_tokens=20)
    assert watch.changed(plan_of(group, (c, 1)))
    assert not watch.changed(plan_of(group, (c, 1)))
    assert watch.changed(plan_of(group, (d, 1)))
    group.join(d, final_tokens=12)
    assert not watch.changed(plan_of(group))  # its place is the same
    assert not watch.changed(plan_of(None, (a, 1), (b, 1), (d, 1)))  # the group was broken up
    assert watch.changed(plan_of(None, (b, 1), (a, 1), (d, 1)))
    assert watch.changed(plan_of(group))
    assert [s.id for s in group.go(3)] == [3]
    group.join(c, final_tokens=20)
    assert watch.changed(plan_of(group))  # as many, and another
    watch.forget()
    assert watch.changed(plan_of(group))


def as_many_and_another(watch: BatchWatch) -> None:
    a, b, c = map(sequence, range(3))
    group = DecodeGroup()
    group.join(a, final_tokens=10)
    group.join(b, final_tokens=20)
    watch.changed(plan_of(group))
    assert group.go(1) == [a]
    group.join(c, final_tokens=20)
    watch.changed(plan_of(group))


def test_who_has_left_without_being_counted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncounted(self: DecodeGroup, steps: int) -> Any:
        ended = honest(self, steps)
        self.left = 0
        return ended

    told = watch(monkeypatch)
    as_many_and_another(Watched())
    assert told == {"changed, another group": 1, "changed, the same group": 1}
    honest = DecodeGroup.go
    monkeypatch.setattr(DecodeGroup, "go", uncounted)
    with pytest.raises(AssertionError):
        as_many_and_another(Watched())
