"""Options that several verbs have, each said once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

MAX_SEED = 2**63 - 1
MAX_PROMPTS = 10**9
"""As in a scenario."""


def above_zero(most: float) -> Callable[[float | None], float | None]:
    """What refuses an option's value that is not above 0, or above *most*; nan is neither."""

    def check(value: float | None) -> float | None:
        if value is not None and not 0 < value <= most:
            raise typer.BadParameter(f"Input should be above 0 and at most {most:g}, not {value:g}")
        return value

    return check


ScenarioFile = Annotated[
    Path | None,
    typer.Argument(metavar="[SCENARIO]", help="Scenario file (TOML); without one the built-in traffic runs."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. workload.num_prompts=100. May be repeated."),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME:KEY=VALUE,...",
        help="A run of your own: the scenario with these keys, e.g. big:kv_cache.preset=doubling,"
        "kv_cache.initial_tokens=1024. A value with commas stands in brackets or quotes. May be repeated.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of every random draw; default: the scenario's.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text for people.")]
FailOnOom = Annotated[bool, typer.Option("--fail-on-oom", help="Exit with 3 when a server died of memory.")]
FailOnSlo = Annotated[
    bool,
    typer.Option("--fail-on-slo", help="Exit with 3 when less than slo.attainment of the requests met the SLO."),
]
TraceFormat = Annotated[
    str | None, typer.Option(help="Format of the trace, where its columns would say another.", show_default=False)
]
Jitter = Annotated[bool, typer.Option("--jitter", help="Spread requests that share a tick of a coarse clock over it.")]
SkipBadLines = Annotated[
    bool, typer.Option("--skip-bad-lines", help="Leave out lines that are no request, and count them.")
]
