"""Plans of every kind, with round numbers, for what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hbmtwin.sim.capacity.assumptions import Assumption, Ends
from hbmtwin.sim.capacity.binding import Binding, Relaxed
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan, OneMore, Peak, Tried
from hbmtwin.sim.capacity.changes import Change
from hbmtwin.sim.capacity.leaning import Lean, Leaning
from hbmtwin.sim.capacity.plan_targets import Target, Value

GIB = 1 << 30


def target(name: str, unit: str, values: tuple[Value, ...], **more: Any) -> Target:
    """With no scenario behind it."""
    return Target(name=name, values=values, keys_of=lambda value: {}, unit=unit, **more)


USERS = target("users", "users", (1, 96, 98, 100, 128))
BINDING = Binding(
    constraint="growth copies",
    broken={"out_of_memory": 3, "ttft_p99": 1},
    causes={"growth_copy": 2, "kv_capacity": 1},
    trials=4,
    relaxed=(Relaxed("KV", "twice the device's memory", 4, 4), Relaxed("max_num_seqs", "max_num_seqs 512", 0, 4)),
    numbers={},
)
CHANGES = (
    Change("INT8 KV", {}, 4, 4, 240, True, False),
    Change("doubling growth", {}, 4, 4, 196, False, True),
    Change("4 devices", {}, 4, 4, 128, False, False),
    Change("paged KV", {}, 4, 4, 120, False, False),
)
LEANING = Leaning(
    answer=96,
    leans=(Lean(Assumption("non_torch_bytes", Ends(2.0, 1.0, 3.0), "default: -"), 98, None),),
    still=(),
    worst=None,
    draws=4,
)
PLAN = CapacityPlan(
    name="a",
    target=USERS,
    kind="found",
    answer=96,
    first_failing=100,
    survive=0.9,
    confidence=0.95,
    chance=True,
    slos=("ttft_p99 <= 2 s",),
    margin="1 %",
    max_preemptions=None,
    tried=(
        Tried(1, 0, 40, 0.0, 0.1, False, True),
        Tried(96, 1178, 1200, 0.9, 1.0, True, True),
        Tried(98, 100, 120, 0.7, 0.9, None, True),
        Tried(100, 20, 40, 0.3, 0.7, False, True),
        Tried(128, 40, 40, 0.9, 1.0, True, True),
    ),
    runs=1400,
    gave_up=False,
    out_of_order=(),
    checked=(48, 128),
    latencies={},
    best_missed={},
    peak=Peak(20 * GIB, 32 * GIB, GIB // 2, 0.97, 16 * GIB, 50 << 20, 96, 0),
    binding=BINDING,
    one_more=OneMore(48, 96, 1, 0.3 * GIB, 0.012, 0.0004, 0.0, {"out_of_memory": 3}, 98, 4),
    changes=CHANGES,
    leaning=LEANING,
)
UNBOUNDED = replace(PLAN, kind="unbounded", answer=128, first_failing=None, slos=("tpot_p99 <= 80 ms",))
NOTHING = replace(
    PLAN,
    kind="nothing_holds",
    answer=None,
    best_missed={"ttft_p99": 2.5, "tpot_p99": None},
    breaks={"out_of_memory": 3, "ttft_p99": 1},
)
ONE, PEAK = PLAN.one_more, PLAN.peak
assert ONE is not None
assert PEAK is not None
PLANS = {
    "found": PLAN,
    "nothing beyond": replace(PLAN, first_failing=None, tried=(PLAN.tried[0], PLAN.tried[1])),
    "all but one": replace(PLAN, first_failing=None),
    "all of it": replace(
        PLAN, target=target("max_model_len", "tokens", (96,), end="all positions of the model"), first_failing=None
    ),
    "the fewest": replace(
        PLAN, target=target("devices", "devices", (128, 96), smaller_is_better=True), first_failing=1, binding=None
    ),
    "one draw": replace(PLAN, changes=(CHANGES[0]._replace(trials=1),), leaning=LEANING._replace(draws=1)),
    "refused": replace(PLAN, peak=PEAK._replace(refused=26, requests=40)),
    "utilization": replace(
        PLAN,
        target=target("gpu_memory_utilization", "", (0.9, 0.6), smaller_is_better=True),
        answer=0.9,
        first_failing=0.6,
        upper=0.95,
        tried=(Tried(0.9, 40, 40, 0.9, 1.0, True, True), Tried(0.6, 0, 40, 0.0, 0.1, False, True)),
    ),
    "rate": replace(
        PLAN,
        target=target("request_rate", "sessions a second", (96, 100)),
        one_more=ONE._replace(by=10.0, next_value=None),
    ),
    "trace": replace(
        PLAN,
        target=target("request_rate", "times the recorded rate", (96, 100)),
        one_more=ONE._replace(then_breaks={}),
        changes=(CHANGES[0]._replace(carries_to=None),),
        leaning=LEANING._replace(draws=1, leans=()),
        out_of_order=((48, 96),),
    ),
    "once": replace(PLAN, chance=False, changes=None, leaning=None, one_more=None, peak=None),
    "unbounded": UNBOUNDED,
    "unbounded though it waits": replace(UNBOUNDED, slos=("tpot_p99 <= 80 ms", "ttft_p50 <= 9 s")),
    "nothing promised": replace(UNBOUNDED, slos=()),
    "nothing promised but no preemption": replace(UNBOUNDED, slos=(), max_preemptions=0),
    "nothing": NOTHING,
    "nothing, unexplained": replace(NOTHING, binding=None, best_missed={}, breaks={}),
    "less than the margin": replace(
        NOTHING, target=target("gpu_memory_utilization", "", (0.98, 0.97), smaller_is_better=True), serves=0.97
    ),
    "not shown": replace(NOTHING, kind="not_shown"),
}
