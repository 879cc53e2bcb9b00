"""The claim of write-up C on servers that are tuned for longer conversations than they have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, NamedTuple

import pandas as pd
from claim import HERE, Found, claim, simulate

from hbmtwin import Scenario, plan

SHORT: Final = "short"
LONG: Final = "long"
C13_TRAFFIC: Final[Mapping[str, tuple[str, ...]]] = {
    SHORT: (),
    LONG: (
        'workload.prompt_tokens={distribution="lognormal",mean=1200,sigma=0.3,min=100,max=1500}',
        'workload.output_tokens={distribution="lognormal",mean=400,sigma=0.3,min=50,max=540}',
    ),
}
"""Two profiles of lengths. No conversation passes 2,048 tokens."""
TUNED, MEASURED = 2048, 512
"""Tokens of static buffers: what no conversation passes, and what 99 in 100 of the short ones do not."""
PAGED: Final = ("memory.oom=preempt",)
SURVIVE, CONFIDENCE = 0.8, 0.9
"""Of the draws of the lengths so many hold; the answer is right with that confidence."""


class Capacity(NamedTuple):
    """Users that a server holds of one traffic, without a death or a preemption."""

    shown: int
    """So many hold in enough draws."""
    failing: int
    """So many do not; those between are not decided."""

    def __str__(self) -> str:
        last = self.failing - 1
        return f"{self.shown}" if self.shown == last else f"{self.shown} to {last}"


@cache
def capacity(traffic: str, *server: str, preset: str | None = None, guess: int) -> Capacity:
    """As ``hbmtwin plan`` answers it; the search begins at the *guess*."""
    load = (f"workload.users={guess}", f"workload.num_prompts={2 * guess}")
    scenario = Scenario.load(HERE / "c13.toml", overrides=[*load, *C13_TRAFFIC[traffic], *server], preset=preset)
    answer = plan(
        scenario,
        "users",
        survive=SURVIVE,
        confidence=CONFIDENCE,
        margin="0%",
        max_preemptions=0,
        explain=False,
        jobs=1,
    )
    assert answer.answer is not None
    assert answer.first_failing is not None
    assert not answer.out_of_order
    return Capacity(int(answer.answer), int(answer.first_failing))


def c13_servers() -> dict[str, dict[str, Capacity | None]]:
    """Each server's capacity for each traffic; None: it refuses every request as too long."""
    measured = f"engine.max_model_len={MEASURED}"
    assert c13_too_long(LONG, MEASURED) == 1
    return {
        f"static buffers of {TUNED:,}": {
            traffic: capacity(traffic, f"engine.max_model_len={TUNED}", guess=14) for traffic in C13_TRAFFIC
        },
        f"static buffers of {MEASURED}": {SHORT: capacity(SHORT, measured, guess=56), LONG: None},
        "pages of 128": {
            SHORT: capacity(SHORT, *PAGED, preset="paged", guess=125),
            LONG: capacity(LONG, *PAGED, preset="paged", guess=18),
        },
    }


@cache
def c13_lengths(traffic: str) -> pd.Series[int]:
    """Of 2,000 conversations: what one measures first."""
    requests = simulate("C13", "workload.num_prompts=2000", *C13_TRAFFIC[traffic], preset="paged").requests
    lengths: pd.Series[int] = requests["prompt_tokens"] + requests["output_tokens"]
    return lengths


def c13_too_long(traffic: str, limit: int) -> float:
    """Share of them that a server with that limit refuses."""
    return float((c13_lengths(traffic) > limit).mean())


@claim(
    "C13",
    "With conversations of 200 tokens, tuning for 2,048 is waste: measure first.",
    picture="Users that static buffers of two sizes and pages hold, of short conversations and of long ones",
)
def c13() -> Found:
    """Users that each server holds of each profile, and what measuring would have told."""
    short, long = (c13_lengths(traffic) for traffic in (SHORT, LONG))
    end = short.quantile(0.99)
    assert MEASURED - 128 < end <= MEASURED
    assert long.max() <= TUNED
    servers = c13_servers()
    tuned, measured, paged = (held[SHORT] for held in servers.values())
    assert tuned is not None
    assert measured is not None
    assert paged is not None
    assert paged.shown > measured.shown
    half = 256
    assert short.mean() < half
    refused = 100 * c13_too_long(SHORT, half)
    return Found(
        "holds",
        f"users at once, of conversations of {short.mean():.0f} tokens on average and of {long.mean():,.0f}: "
        + "; ".join(f"{name}, {held[SHORT]} and {held[LONG] or 0}" for name, held in servers.items())
        + f" (in {100 * SURVIVE:.0f} % of draws, with {100 * CONFIDENCE:.0f} % confidence)",
        "A static buffer takes what the limit says, whoever fills it: a quarter of the limit holds "
        f"{measured.shown / tuned.shown:.0f} times as many, and refuses {100 * c13_too_long(SHORT, MEASURED):.1f} % as "
        f"too long. What must be measured is the end of the lengths, not their mean: {half} tokens, in which the "
        f"average conversation fits, would refuse {refused:.0f} %, while 99 in 100 have at most {end:.0f}. And who "
        "tunes for the short ones serves none of the long. Pages need not be tuned: they take what a conversation has, "
        "up to a page.",
        "The waste is real, and it is that of buffers which are taken by the limit. Before choosing one, measure, and "
        "look at the end of the lengths, not at their middle: `hbmtwin workload describe TRACE` tells both. Or take "
        "pages, to which a limit that nobody reaches costs nothing. The first of these numbers is the "
        f"answer of `hbmtwin plan examples/claims/c13.toml --margin 0% --survive {SURVIVE:g} --confidence "
        f"{CONFIDENCE:g}`.",
    )
