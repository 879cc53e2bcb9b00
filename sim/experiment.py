"""Several runs that belong together: the same traffic under several policies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from joblib import Parallel, delayed

from hbmtwin.sim.idle_settings import idle_reason
from hbmtwin.sim.legality import effective_oom
from hbmtwin.sim.processes import cores, end_workers, ends_with_us, kill_workers, workers_deaf_to_ctrl_c
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin, run
from hbmtwin.sim.scenario import Scenario, ScenarioError, known_keys

T = TypeVar("T")


def compare(
    path: Path | None,
    policies: Sequence[str],
    *,
    variants: Mapping[str, Sequence[str]] | None = None,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    jobs: int = -1,
    finished: Callable[[str], None] | None = None,
    left_out: Callable[[str, str], None] | None = None,
) -> dict[str, Result]:
    """Run the same scenario under each preset, then under each variant; return the results in that order.

    A variant is a name and ``a.b=c`` settings on top of the scenario as :func:`hbmtwin.sim.run.run` would take it.
    *jobs* processes run at once (-1: one a core); *finished* is told each name as its run comes in. Raise what
    :class:`hbmtwin.sim.run.Twin` raises, with a note that names the variant, or the preset that is illegal here; every
    server is built, and so checked, before the first run starts. With *left_out*, presets that are illegal here do not
    run, unless none is legal: it is told their names and the reasons.
    """
    scenarios = {name: Scenario.load(path, overrides=overrides, preset=name, seed=seed) for name in policies}
    for name, scenario in tuple(scenarios.items()):
        try:
            Twin(scenario)
        except ScenarioError as error:
            if left_out is not None and (len(scenarios) > 1 or variants):
                left_out(name, str(error))
                del scenarios[name]
                continue
            error.add_note(f"preset {name!r}")
            raise
    for name, settings in (variants or {}).items():
        if name in scenarios:
            raise ValueError(f"there is a run called {name!r} already")
        try:
            scenarios[name] = Scenario.load(path, overrides=[*overrides, *settings], seed=seed)
            Twin(scenarios[name])
        except Exception as error:
            error.add_note(f"variant {name!r}")
            raise
    names = list(scenarios)
    told = (lambda place: finished(names[place])) if finished is not None else None
    results = in_processes(run, list(scenarios.values()), jobs=jobs, finished=told)
    return dict(zip(names, results, strict=True))


def in_processes(
    call: Callable[[Scenario], T],
    scenarios: Sequence[Scenario],
    *,
    jobs: int = -1,
    finished: Callable[[int], None] | None = None,
) -> list[T]:
    """Call a function with each scenario, in *jobs* processes; return what it returned, in their order.

    *finished* is told the place of each as it comes in. An interrupt leaves no process behind, and so does the end.
    """
    outcomes: list[T] = []
    if not scenarios:
        return outcomes
    processes = min(len(scenarios), cores(jobs))
    coming: Generator[T, None, None] | None = None
    try:
        with workers_deaf_to_ctrl_c():
            coming = Parallel(n_jobs=processes, return_as="generator", **ends_with_us())(
                delayed(call)(scenario) for scenario in scenarios
            )
        for place, outcome in enumerate(coming):
            outcomes.append(outcome)
            if finished is not None:
                finished(place)
        if processes > 1:
            end_workers()
    except BaseException:  # an interrupt too: workers would finish their runs for nobody, then wait for ever
        kill_workers(coming)
        raise
    return outcomes


def differences(scenarios: Mapping[str, Scenario]) -> dict[str, dict[str, Any]]:
    """The keys on which scenarios differ, in the order of the file: the value of each, by name of scenario.

    A scenario whose KV policy does not know a key has no value there; a key that some know and others do not differs
    if its value is not the default. ``memory.oom`` is the one in force; ``kv_cache.preset``, being a name for other
    keys, is left out.
    """
    table: dict[str, dict[str, Any]] = {}
    for key in known_keys():
        values = {name: _value(scenario, key) for name, scenario in scenarios.items() if not idle_reason(scenario, key)}
        default = [_value(Scenario(), key)] if 0 < len(values) < len(scenarios) else []
        if key != "kv_cache.preset" and not _alike([*values.values(), *default]):
            table[key] = values
    return table


def _value(scenario: Scenario, key: str) -> Any:
    """The value of a dotted key, ``memory.oom`` with its default."""
    if key == "memory.oom":
        return effective_oom(scenario)
    section, _, name = key.rpartition(".")
    return getattr(getattr(scenario, section) if section else scenario, name)


def _alike(values: Sequence[Any]) -> bool:
    """Whether all are equal."""
    return all(value == values[0] for value in values)
