"""Ask for a plan by name: what the command line and a notebook call.

::

    plan(Scenario.load(path), target="users", slo="ttft_p99=2s")    one answer
    plan_each({"paged": ..., "doubling": ...}, question, runs)       several, on the same runs and processes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan
from hbmtwin.sim.capacity.capacity_runs import CapacityRuns
from hbmtwin.sim.capacity.plan_capacity import PlanQuestion, asked, plan_capacity
from hbmtwin.sim.capacity.promise import parse_margin, parse_slos
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sweep.store import RunStore
from hbmtwin.sim.sweep.workers import workers_kept
from hbmtwin.sim.traffic import source_of


def plan(
    scenario: Scenario,
    target: str | None = None,
    *,
    slo: str | None = None,
    survive: float = 0.95,
    confidence: float = 0.95,
    margin: str = "1%",
    max_preemptions: int | None = None,
    seeds: int | None = None,
    explain: bool = True,
    out: Path | None = None,
    jobs: int = -1,
) -> CapacityPlan:
    """Plan one scenario, in the words of ``hbmtwin plan``.

    *out* keeps each run as it ends: a plan that was killed goes on there. Raise ScenarioError, CatalogError,
    WorkloadError, DoesNotFit; ResultError for *out*; RunFailed for a run that ends in another error.
    """
    question = question_of(
        target,
        slo=slo,
        survive=survive,
        confidence=confidence,
        margin=margin,
        max_preemptions=max_preemptions,
        seeds=seeds,
        explain=explain,
    )
    with ExitStack() as ends:
        store = None if out is None else ends.enter_context(RunStore(out))
        runs = CapacityRuns(jobs=jobs, store=store)
        return plan_each({"": scenario}, question, runs)[""]


def question_of(
    target: str | None,
    *,
    slo: str | None,
    survive: float,
    confidence: float,
    margin: str,
    max_preemptions: int | None,
    seeds: int | None,
    explain: bool,
) -> PlanQuestion:
    """What is asked, from words. Raise ScenarioError."""
    return PlanQuestion(
        target=target,
        slos=() if slo is None else parse_slos(slo),
        survive=survive,
        confidence=confidence,
        margin=parse_margin(margin),
        max_preemptions=max_preemptions,
        seeds=seeds,
        explain=explain,
    )


def plan_each(
    scenarios: Mapping[str, Scenario],
    question: PlanQuestion,
    runs: CapacityRuns,
    *,
    left_out: Callable[[str, str], None] | None = None,
) -> dict[str, CapacityPlan]:
    """Plan several scenarios one after another, with the same processes.

    With *left_out*, one that is illegal or does not start is told there, unless none is left.
    """
    plans: dict[str, CapacityPlan] = {}
    last: Exception | None = None
    with workers_kept(), TemporaryDirectory(prefix="hbmtwin-plan-") as folder:
        for name, scenario in scenarios.items():
            source_of(scenario)  # a file that is missing or faulty is told before the first run
            try:
                plans[name] = plan_capacity(scenario, question, runs, Path(folder), name=name)
            except (ScenarioError, DoesNotFit) as error:
                if left_out is None or len(scenarios) == 1:
                    raise
                left_out(name, str(error))
                last = error
    if not plans and last is not None:
        raise last
    return plans


def check_each(scenarios: Mapping[str, Scenario], question: PlanQuestion) -> None:
    """Raise, before anything runs, what :func:`plan_each` raises of what is asked: of the last, where none can be."""
    last: Exception | None = None
    for scenario in scenarios.values():
        source_of(scenario)
        try:
            asked(scenario, question, CapacityRuns())
        except (ScenarioError, DoesNotFit) as error:
            last = error
        else:
            return
    if last is not None:
        raise last
