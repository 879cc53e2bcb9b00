"""The claim of write-up C on servers that are tuned for longer conversations than they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import pandas as pd
from claim import Found, claim, simulate

from hbmtwin import Result

SHORT: Final = "of 200 tokens"
LONG: Final = "near 2,048"
C13_TRAFFIC: Final[Mapping[str, tuple[str, ...]]] = {
    SHORT: (),
    LONG: (
        'workload.prompt_tokens={distribution="lognormal",mean=1200,sigma=0.3,min=100,max=1500}',
        'workload.output_tokens={distribution="lognormal",mean=400,sigma=0.3,min=50,max=540}',
    ),
}
"""Two profiles of lengths, by the words of the table. No conversation passes 2,048 tokens."""
C13_LIMITS: Final = (256, 512, 2048)
"""Of static buffers: what holds the mean of the short conversations, 99 in 100 of them, and both."""
C13_MOST: Final = 256
"""Users who are too many for every server."""


class Capacity(NamedTuple):
    """What a server holds of one traffic."""

    users: int
    """The most without a death or a preemption; 0 if it serves no request."""
    refused: float
    """Percent of the requests, which are longer than its limit."""


def capacity(traffic: str, *server: str, preset: str | None = None) -> Capacity:
    """Find it by bisection. O(log C13_MOST) runs."""

    def attempt(users: int) -> Result:
        load = (f"workload.users={users}", f"workload.num_prompts={max(200, 3 * users)}")
        return simulate("C13", *load, *C13_TRAFFIC[traffic], *server, preset=preset)

    holds, fails = 0, C13_MOST
    refused = 0.0
    while fails - holds > 1:
        middle = (holds + fails) // 2
        result = attempt(middle)
        summary = result.summary
        share = 100 * summary["requests_rejected"].get("max_model_len", 0) / summary["requests_total"]
        if share == 100:
            return Capacity(0, share)
        if result.oom is None and not summary["preemptions"]:
            holds, refused = middle, share
        else:
            fails = middle
    assert fails < C13_MOST, f"{C13_MOST} users are not too many"
    return Capacity(holds, refused)


def c13_static(limit: int, traffic: str) -> Capacity:
    """Buffers of *limit* tokens."""
    return capacity(traffic, f"engine.max_model_len={limit}")


def c13_paged(traffic: str) -> Capacity:
    """Pages of 128 tokens, tuned for 2,048 or for nothing at all."""
    return capacity(traffic, "memory.oom=preempt", preset="paged")


def c13_lengths(traffic: str) -> pd.Series[int]:
    """Of 2,000 conversations: what one measures first."""
    requests = simulate("C13", "workload.num_prompts=2000", *C13_TRAFFIC[traffic], preset="paged").requests
    lengths: pd.Series[int] = requests["prompt_tokens"] + requests["output_tokens"]
    return lengths


@claim(
    "C13",
    "With conversations of 200 tokens, tuning for 2,048 is waste: measure first.",
    picture="Users that static buffers of three sizes and pages hold, of short conversations and of long ones",
)
def c13() -> Found:
    """Users that each server holds of each profile, and what measuring would have told."""
    mean, measured, told = C13_LIMITS
    short, long = (c13_lengths(traffic) for traffic in (SHORT, LONG))
    assert short.mean() < mean
    assert measured - 128 < short.quantile(0.99) <= measured
    assert long.max() <= told
    static = {limit: c13_static(limit, SHORT) for limit in C13_LIMITS}
    static_long = {limit: c13_static(limit, LONG) for limit in C13_LIMITS}
    paged, paged_long = c13_paged(SHORT), c13_paged(LONG)
    assert static_long[mean].users == static_long[measured].users == 0
    gain = static[measured].users / static[told].users
    return Found(
        "holds",
        f"users at once, of conversations of {short.mean():.0f} tokens and of {long.mean():,.0f} on average: static "
        f"buffers of {told:,} {static[told].users} and {static_long[told].users}; of {measured} "
        f"{static[measured].users} ({static[measured].refused:.1f} % of the requests are too long) and "
        f"{static_long[measured].users}; pages of 128 {paged.users} and {paged_long.users}",
        f"A static buffer takes what the limit says, whoever fills it: a quarter of the limit holds {gain:.0f} times "
        f"as many. But what must be measured is the longest, not the mean: buffers of {mean}, in which the average "
        f"conversation fits, hold {static[mean].users} users and refuse {static[mean].refused:.0f} % of the requests; "
        f"99 in 100 have at most {short.quantile(0.99):.0f} tokens. And who tunes for the short ones serves none of "
        "the long. Pages need not be tuned: they take what a conversation has, up to a page.",
        "The waste is real, and it is that of buffers which are taken by the limit. Before choosing one, measure, and "
        "look at the end of the lengths, not at their middle: `hbmtwin workload describe TRACE` tells both. Or take "
        "pages, to which a limit that nobody reaches costs nothing.",
    )
