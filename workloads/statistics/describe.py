"""What a trace looks like: its statistics in one pass, so that two traffics can be laid side by side.

    requests in order of arrival ->  ArrivalMeter   rate, gaps, counts in windows
                                     lengths        counts of each length, and of pairs
                                     SessionMeter   turns and gaps; tenants
                                     ReuseMeter     blocks shared, caches of each size (from the first shared prompt)

A request is looked at once and let go. What is kept grows with the different lengths, the tenants, the sessions that
go on and, where prompts share anything, the different blocks; never with the number of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from hbmtwin.workloads.records import Request, WorkloadError, user_stream
from hbmtwin.workloads.statistics.arrivals import ArrivalMeter, ArrivalStatistics
from hbmtwin.workloads.statistics.lengths import QUANTILES, LengthStatistics, PairMeter, length_statistics
from hbmtwin.workloads.statistics.reuse import ReuseMeter, ReuseStatistics
from hbmtwin.workloads.statistics.sessions import (
    SessionFinder,
    SessionMeter,
    SessionStatistics,
    TenantStatistics,
    tenant_statistics,
)

BLOCK_SIZE: Final = 16
"""Tokens of a block that sharing is measured in, where nothing else is said: vLLM's default."""


@dataclass(frozen=True, slots=True)
class Description:
    """The statistics of a traffic. What it does not tell is None."""

    requests: int
    arrivals: ArrivalStatistics
    prompt_tokens: LengthStatistics
    output_tokens: LengthStatistics
    pearson: float | None
    """Of prompt and output lengths; None where one of the two is always the same."""
    spearman: float | None
    spearman_exact: bool
    """False where there were so many pairs that the ranks are of lengths to their leading bits."""
    tenants: TenantStatistics | None
    """None where there are not two clients."""
    sessions: SessionStatistics | None
    """None where every session has one turn, and no prompt begins with another."""
    reuse: ReuseStatistics | None
    """None where no two prompts can share a beginning."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, texts and lists, as JSON has them; quantiles under names such as ``p99``.

        Without the counts that pictures are drawn from.
        """
        found = asdict(self)
        for name in ("coarse", "fine"):
            del found["arrivals"][name]
        for side in ("prompt_tokens", "output_tokens"):
            for name in ("values", "counts"):
                del found[side][name]
            quantiles = zip(QUANTILES, found[side]["quantiles"], strict=True)
            found[side]["quantiles"] = {f"p{100 * q:g}": value for q, value in quantiles}
        return found


def describe(requests: Iterable[Request], *, block_size: int = BLOCK_SIZE) -> Description:
    """The statistics of requests in order of arrival, read once.

    Sharing is measured in blocks of *block_size* tokens. A first turn that is all its user's own text is taken for one
    that no other shares, unless ``has_next`` says that its session goes on. O(requests + blocks x capacities). Raise
    WorkloadError where there are no requests, one arrives before the one above it, or the block size is below 1.
    """
    if block_size < 1:
        raise WorkloadError(f"block_size is {block_size}; a block has at least 1 token")
    arrivals, pairs, sessions, finder = ArrivalMeter(), PairMeter(), SessionMeter(), SessionFinder()
    prompts: dict[int, int] = {}
    outputs: dict[int, int] = {}
    tenants: dict[int, int] = {}
    reuse = ReuseMeter(block_size)
    count = 0
    for r in requests:
        count += 1
        arrivals.add(r.arrival_ns)
        prompts[r.prompt_tokens] = prompts.get(r.prompt_tokens, 0) + 1
        outputs[r.output_tokens] = outputs.get(r.output_tokens, 0) + 1
        pairs.add(r.prompt_tokens, r.output_tokens)
        tenants[r.tenant] = tenants.get(r.tenant, 0) + 1
        private = _private(r)
        sessions.add(r.session, r.turn, r.arrival_ns, not private)
        if private:
            reuse.add_private(r.spans)
            finder.add_private()
        else:
            chain = reuse.chain(r.spans)
            reuse.add(chain)
            finder.add(chain, r.arrival_ns)
    if not count:
        raise WorkloadError("there are no requests to describe")
    return Description(
        requests=count,
        arrivals=arrivals.statistics(),
        prompt_tokens=length_statistics(prompts),
        output_tokens=length_statistics(outputs),
        pearson=pairs.pearson(),
        spearman=pairs.spearman(),
        spearman_exact=pairs.exact,
        tenants=tenant_statistics(tenants),
        sessions=sessions.statistics(inferred=False) if sessions.has_turns else finder.statistics(),
        reuse=reuse.statistics(),
    )


def _private(r: Request) -> bool:
    """Whether no other prompt can begin as this one does: all of it is one user's, in a session of one turn."""
    own = user_stream(r.session, r.turn)
    return not r.has_next and not r.turn and all(stream == own for stream, _, _ in r.spans)
