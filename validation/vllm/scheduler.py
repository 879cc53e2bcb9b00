"""Holds our scheduler to vLLM's own Scheduler, each over its own block manager: compared at every step.

::

    --groups full                      one full-attention group: over PagedPolicy, and over PagedGroupsPolicy
    --groups window, chunked, mamba    beside full attention or alone: over PagedGroupsPolicy
    --async                            our asynchronous scheduler beside vLLM's AsyncScheduler, on the same servers
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.sim.schedulers.vllm_async import AsyncVllmScheduler
from hbmtwin.validation.vllm.groups import chunked, full, mamba, window
from hbmtwin.validation.vllm.planted_async import PLANTED_AHEAD
from hbmtwin.validation.vllm.planted_steps import PLANTED_STEPS
from hbmtwin.validation.vllm.sides import Pool
from hbmtwin.validation.vllm.source import VERSION, NoVllm, StubCalled, unpacked, vllm_core
from hbmtwin.validation.vllm.steps import Server, Steps
from hbmtwin.validation.vllm.steps_async import AsyncSteps, OurAsyncScheduler, VllmOwnAsyncScheduler
from hbmtwin.validation.vllm.steps_ours import OurScheduler
from hbmtwin.validation.vllm.steps_traffic import Requests
from hbmtwin.validation.vllm.steps_vllm import VllmOwnScheduler

STEPS = 100_000
POLICIES: tuple[Literal["fcfs", "priority"], ...] = ("fcfs", "priority")
BOTH = (True, False)


def _servers(
    *groups: KVGroup,
    blocks: int,
    longest: int,
    budget: int,
    seqs: int,
    threshold: int = 0,
    chunks: bool = True,
    caching: tuple[bool, ...] = BOTH,
    **settings: Any,
) -> tuple[Server, ...]:
    """One for either policy, with prefix caching and without."""
    return tuple(
        Server(
            pool=Pool(
                groups=groups,
                num_blocks=blocks,
                max_model_len=longest,
                max_num_batched_tokens=budget,
                caching=switch,
                **settings,
            ),
            max_num_seqs=seqs,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunks,
        )
        for policy in POLICIES
        for switch in caching
    )


SERVERS: dict[str, tuple[Server, ...]] = {
    "full": (
        *_servers(full(4), blocks=24, longest=80, budget=16, seqs=4),
        *_servers(full(4), blocks=45, longest=120, budget=32, seqs=8),
        *_servers(full(4), blocks=60, longest=200, budget=24, seqs=12, threshold=10, watermark=0.1),
        *_servers(full(4), blocks=60, longest=150, budget=5, seqs=16),
        *_servers(full(4), blocks=40, longest=140, budget=12, seqs=16, threshold=4),
        *_servers(full(4), blocks=40, longest=140, budget=12, seqs=16, threshold=5, reserve_full_sequence=False),
        *_servers(full(4), blocks=45, longest=170, budget=24, seqs=8, watermark=0.2),
        *_servers(full(4), blocks=45, longest=120, budget=24, seqs=8, reserve_full_sequence=False),
        *_servers(full(4), blocks=90, longest=160, budget=160, seqs=16, chunks=False),
        *_servers(full(4), blocks=90, longest=160, budget=170, seqs=16, chunks=False, threshold=24, watermark=0.05),
        *_servers(full(1), blocks=50, longest=40, budget=8, seqs=6),
        *_servers(full(16), blocks=40, longest=300, budget=64, seqs=16),
        *_servers(full(16), blocks=400, longest=1000, budget=256, seqs=24, threshold=100, watermark=0.01),
    ),
    "window": (
        *_servers(window(10, 4), blocks=22, longest=150, budget=24, seqs=6),
        *_servers(full(4), window(6, 4), blocks=60, longest=150, budget=24, seqs=8),
        *_servers(full(4), window(6, 4), blocks=60, longest=150, budget=24, seqs=8, reserve_full_sequence=False),
        *_servers(window(9, 4), full(4), window(9, 4), blocks=120, longest=240, budget=40, seqs=12, watermark=0.1),
        *_servers(full(8), window(4, 4), blocks=70, longest=240, budget=40, seqs=10, threshold=13),
        *_servers(full(4), window(13, 8), blocks=60, longest=150, budget=160, seqs=8, chunks=False),
    ),
    "chunked": (
        *_servers(full(4), chunked(16, 4), blocks=60, longest=150, budget=24, seqs=8),
        *_servers(full(4), chunked(10, 4), blocks=80, longest=240, budget=40, seqs=12, watermark=0.1),
    ),
    "mamba": (
        *_servers(full(4), mamba("none", 150), blocks=50, longest=150, budget=24, seqs=8, caching=(False,)),
        *_servers(full(4), mamba("all", 4), blocks=60, longest=150, budget=24, seqs=8, caching=(True,)),
        *_servers(full(4), mamba("align", 4), blocks=60, longest=150, budget=24, seqs=8, caching=(True,)),
        *_servers(full(4), mamba("align", 4), blocks=45, longest=150, budget=24, seqs=8, threshold=7, caching=(True,)),
        *_servers(full(16), mamba("align", 16), blocks=40, longest=400, budget=10, seqs=6, caching=(True,)),
        *_servers(
            full(16), mamba("align", 16), blocks=40, longest=400, budget=64, seqs=8, threshold=11, caching=(True,)
        ),
        *_servers(full(4), window(6, 4), mamba("align", 4), blocks=70, longest=240, budget=40, seqs=8, caching=(True,)),
        *_servers(
            mamba("align", 4), mamba("align", 4), full(4), blocks=70, longest=240, budget=40, seqs=10, caching=(True,)
        ),
    ),
}


class Run(NamedTuple):
    """One server, and whether the policy of several groups manages its blocks."""

    kind: str
    server: Server
    grouped: bool


def runs(groups: str) -> Iterator[Run]:
    """Those asked for: with one full-attention group, each policy of blocks once."""
    for kind in SERVERS if groups == "all" else (groups,):
        for server in SERVERS[kind]:
            if kind == "full":
                yield Run(kind, server, grouped=False)
            yield Run(kind, server, grouped=True)


def async_runs(groups: str) -> Iterator[Run]:
    """The same servers, which plan ahead."""
    for run in runs(groups):
        yield Run(f"{run.kind}, planned ahead", replace(run.server, async_scheduling=True), run.grouped)


def both_sides(core: Mapping[str, Any], run: Run, planted: str | None = None) -> Steps:
    """Our scheduler, with a mistake if one is *planted*, beside vLLM's own."""
    server = run.server
    if server.async_scheduling:
        ahead = PLANTED_AHEAD[planted] if planted else AsyncVllmScheduler
        return AsyncSteps(OurAsyncScheduler(server, ahead, grouped=run.grouped), VllmOwnAsyncScheduler(core, server))
    scheduler = PLANTED_STEPS[planted] if planted else VllmScheduler
    return Steps(OurScheduler(server, scheduler, grouped=run.grouped), VllmOwnScheduler(core, server))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: equal at every step; 1: they differ; 2: vLLM's source could not be had or used."""
    parser = argparse.ArgumentParser(prog="validate_paged --scheduler", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, help=f"vllm-{VERSION}.tar.gz or its unpacked folder (default: download)")
    parser.add_argument("--groups", choices=(*SERVERS, "all"), default="all", help="kinds of layers (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of all servers together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--async", dest="ahead", action="store_true", help="plan a step while the last is computed")
    mistakes = sorted({*PLANTED_STEPS, *PLANTED_AHEAD})
    parser.add_argument("--planted", choices=mistakes, help="a mistake to make on purpose; some with --async only")
    chosen = parser.parse_args(arguments)
    if chosen.planted and chosen.planted not in (PLANTED_AHEAD if chosen.ahead else PLANTED_STEPS):
        parser.error(f"--planted {chosen.planted} goes {'without' if chosen.ahead else 'with'} --async only")
    chosen_runs = list((async_runs if chosen.ahead else runs)(chosen.groups))
    each = -(-chosen.steps // len(chosen_runs))
    counts: dict[str, Counter[str]] = {}
    differ = 0
    try:
        with tempfile.TemporaryDirectory() as folder, vllm_core(unpacked(chosen.vllm, Path(folder))) as core:
            for number, run in enumerate(chosen_runs):
                both = both_sides(core, run, chosen.planted)
                found = Requests(both, run.server, chosen.seed * 1000 + number).run(each)
                differ += bool(found)
                policy = "paged_groups" if run.grouped else "paged"
                count = counts.setdefault(f"{run.kind}, {policy}", Counter())
                count += both.met + Counter(steps=both.steps, servers=1, differ=bool(found))
                print(f"{policy}, {run.server}: {both.steps} steps, {found or 'no difference'}", flush=True)
    except (NoVllm, StubCalled) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    for name, count in counts.items():
        told = ", ".join(f"{count[what]} {what}" for what in count if what not in ("steps", "servers", "differ"))
        print(f"{name}: {count['steps']} steps, {count['differ']} of {count['servers']} servers differ; {told}")
    theirs = "AsyncScheduler" if chosen.ahead else "Scheduler"
    print(f"vLLM {VERSION}'s own {theirs}: {differ} of {len(chosen_runs)} runs differ")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
