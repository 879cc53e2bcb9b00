"""Several draws of one traffic: seeds where it is drawn, windows where it was recorded.

::

    drawn traffic       seed 0        seed 1        seed 2             same rates and lengths, other arrivals and draws
    a trace             |window 0 |   |window 1 |   |window 2 |        requests 0.., 6455.., 12910.. of its file

A trace has happened once. Its windows do not overlap, and begin evenly spread over it; where the scenario sets no
``workload.num_prompts``, they are the whole trace in equal parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.traffic import source_of

SEEDS = Phrase("{count} seeds", "{count} 个种子")
SEED = Phrase("1 seed", "1 个种子")
ONE_TRACE = Phrase(
    "one trace, which has happened once: there is no spread to tell", "一条 trace，只发生过一次：无从得知离散程度"
)
WINDOWS = Phrase(
    "{count} windows of {each:,} requests, spread over the trace without overlap",
    "{count} 个窗口，各 {each:,} 条请求，均匀分布在 trace 上，互不重叠",
)


class Draw(NamedTuple):
    """One draw: its name, and the dotted keys that choose it."""

    name: str
    keys: dict[str, Any]


def draws_of(scenario: Scenario, count: int) -> tuple[Draw, ...]:
    """*count* draws of a scenario's traffic; of one of a trace, the trace as the scenario has it.

    O(1), for a trace O(lines). Raise ScenarioError where the windows do not fit into the trace side by side,
    WorkloadError for a faulty file.
    """
    w = scenario.workload
    if w.trace is None:
        return tuple(Draw(f"seed {seed}", {"seed": seed}) for seed in range(scenario.seed, scenario.seed + count))
    if count == 1:
        return (Draw("the trace", {}),)
    whole = source_of(scenario.model_copy(update={"workload": w.model_copy(update={"num_prompts": None})}))
    total = (whole.total_requests or 0) // w.samples
    each = total // count if w.num_prompts is None else w.num_prompts
    if each * count > total or each < 1:
        most = total if w.num_prompts is None else total // w.num_prompts
        behind = f" behind the first {w.trace_skip:,}" * bool(w.trace_skip)
        raise ScenarioError(
            f"--seeds {count}: {w.trace} has {total:,} requests{behind}, of which {count} windows of {max(1, each):,} "
            f"do not fit side by side; {f'at most {most:,}, or ' * bool(most)}set a smaller workload.num_prompts"
        )
    starts = (w.trace_skip + (total - each) * i // (count - 1) for i in range(count))
    return tuple(
        Draw(f"from request {start:,}", {"workload.trace_skip": start, "workload.num_prompts": each})
        for start in starts
    )


def what_varies(scenario: Scenario, draws: tuple[Draw, ...], lang: Lang = "en") -> str:
    """What the draws are, in words."""
    count = len(draws)
    if scenario.workload.trace is None:
        return Said.of(SEEDS if count > 1 else SEED, count=count).text(lang)
    if count == 1:
        return Said.of(ONE_TRACE).text(lang)
    return Said.of(WINDOWS, count=count, each=draws[0].keys["workload.num_prompts"]).text(lang)
