"""``hbmtwin plan``: how many users, which rate, length, share or devices, with a stated confidence."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.exits import DOES_NOT_FIT, OK, UsageError
from hbmtwin.cli.fit import Language
from hbmtwin.cli.options import Json, Overrides, ScenarioFile, Seed, Variants
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from hbmtwin.api import PlanQuestion, Scenario
    from hbmtwin.sim.sweep.store import RunStore

FIRST_RUNS = 8
"""After so many it is told how long the others may take."""
OTHER_RUNS = 500
"""Of scouting, of checks, and of what binds, helps and is leaned on: about."""
WORTH_S = 20.0


def plan(
    scenario: ScenarioFile = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="users, request_rate, max_model_len, devices or gpu_memory_utilization; default: users of a closed "
            "loop, request_rate of other traffic.",
            show_default=False,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="What is promised, e.g. ttft_p99=2s,tpot_p99=80ms (ttft, tpot, e2e, queue; p50, p90, p95, p99).",
            show_default=False,
        ),
    ] = None,
    survive: Annotated[
        float, typer.Option(help="Share of the runs that is to hold; 0.99 takes five times as many.")
    ] = 0.95,
    confidence: Annotated[float, typer.Option(help="With which both ends of the answer are right.")] = 0.95,
    margin: Annotated[str, typer.Option(help="What the peak must leave: 2% of the device, or 1GiB.")] = "1%",
    max_preemptions: Annotated[
        int | None,
        typer.Option(help="Most preemptions of a run; default: none without --slo, any with it.", show_default=False),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Presets to plan one by one, separated by commas.", show_default=False)
    ] = None,
    variants: Variants = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="MAX", help="Most seeds at one value; default: 2.5 times what a yes takes.", show_default=False
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the answer: not what binds, what would help, and what it leans on.")
    ] = False,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for plan.json and each run as it ends; a killed plan goes on there."),
    ] = None,
    seed: Seed = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Runs at once; -1: one a core.")] = -1,
    lang: Annotated[Language, typer.Option(help="Language of what is printed.")] = Language.EN,
    json_: Json = False,
) -> int:
    """Find the largest load that holds, or the smallest server: the answer, its margin, and what it leans on."""
    from hbmtwin.api import CapacityRuns, check_question, plan_each, question_of
    from hbmtwin.cli.plan_screen import PlanScreen
    from hbmtwin.sim.capacity.plan_file import write_plans

    if jobs == 0 or jobs < -1:
        raise UsageError(f"--jobs: 1 or more, or -1 for one a core, not {jobs}")
    question = question_of(
        target,
        slo=slo,
        survive=survive,
        confidence=confidence,
        margin=margin,
        max_preemptions=max_preemptions,
        seeds=seeds,
        explain=not quick,
    )
    check_question(question)
    scenarios = _scenarios(scenario, policies, variants, overrides, seed)
    refused: dict[str, str] = {}

    def left_out(name: str, reason: str) -> None:
        refused[name] = reason
        _tell_left_out(name, reason)

    with _opened(out) as store, _told(question, len(scenarios)) as landed:
        runs = CapacityRuns(jobs=jobs, store=store, landed=landed)
        plans = plan_each(scenarios, question, runs, left_out=left_out)
        if out is not None:
            write_plans(plans, refused, out)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without Chinese letters gets their numbers, as in fit
        sys.stdout.reconfigure(errors="backslashreplace")
    if json_:
        told = {name or "scenario": found.to_dict() for name, found in plans.items()}
        print(json_text({"plans": told, "left_out": refused}))
    else:
        PlanScreen(stdout(), lang.value).show(plans)
    return OK if any(found.answer is not None for found in plans.values()) else DOES_NOT_FIT


def _scenarios(
    path: Path | None, policies: str | None, variants: list[str] | None, overrides: list[str] | None, seed: int | None
) -> dict[str, Scenario]:
    """The scenario, or one for each preset and variant."""
    from hbmtwin.api import Scenario
    from hbmtwin.cli.simulate import presets_of
    from hbmtwin.sim.variants import parse_variants

    own = parse_variants(variants or ())
    names = presets_of(policies) if policies is not None else []
    if policies is not None and not names and not own:
        raise UsageError("--policies: no preset is named; write for example --policies doubling,paged")
    found = {name: Scenario.load(path, overrides=overrides or (), preset=name, seed=seed) for name in names}
    for name, settings in own.items():
        found[name] = Scenario.load(path, overrides=[*(overrides or ()), *settings], seed=seed)
    return found or {"": Scenario.load(path, overrides=overrides or (), seed=seed)}


@contextmanager
def _opened(out: Path | None) -> Iterator[RunStore | None]:
    """The store of runs, if there is one; whatever ends the plan early, it is said what stands in it."""
    from hbmtwin.api import ResultError
    from hbmtwin.sim.sweep.store import RunStore, check_runs_directory

    if out is None:
        yield None
        return
    try:
        check_runs_directory(out)
    except ResultError as error:
        raise UsageError(str(error)) from None
    with RunStore(out) as store:
        for remark in store.remarks:
            print(f"note: {remark}", file=sys.stderr)
        try:
            yield store
        except BaseException:
            if count := len(store.finished()):
                print(f"note: {count:,} runs stand in {out}; the same command goes on from there", file=sys.stderr)
            raise


@contextmanager
def _told(question: PlanQuestion, plans: int) -> Iterator[Callable[[int], None]]:
    """What is called with the number of runs: progress, and after the first ones how long it may take."""
    from hbmtwin.api import rule_of
    from hbmtwin.cli.progress import progress_of_runs

    begin = time.monotonic()
    least = rule_of(question).least_for_yes
    expected = plans * (3 * least + (OTHER_RUNS if question.explain else OTHER_RUNS // 4))

    with progress_of_runs() as finished:

        def landed(count: int) -> None:
            nonlocal begin
            finished("a run is")
            if count == 1:
                begin = time.monotonic()  # before it workers started, which takes longer than a small run
            if count == FIRST_RUNS and (left_s := (time.monotonic() - begin) / (count - 1) * expected) > WORTH_S:
                cure = "--quick, or a lower --survive, takes" if question.explain else "a lower --survive takes"
                print(
                    f"note: about {expected:,} runs, {left_s / 60:.1f} minutes as the first went ({least} that hold "
                    f"make a yes at --survive {question.survive:g}; {cure} fewer)",
                    file=sys.stderr,
                )

        yield landed


def _tell_left_out(name: str, reason: str) -> None:
    print(f"note: {name!r} is left out: {reason}", file=sys.stderr)
