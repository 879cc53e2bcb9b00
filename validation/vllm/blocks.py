"""Holds the paged KV policies to vLLM's own KVCacheManager: one random traffic, compared at every operation.

::

    --groups full      one full-attention group     PagedPolicy, and PagedGroupsPolicy with that one group
    --groups window    sliding windows              PagedGroupsPolicy
    --groups chunked   chunked local attention      PagedGroupsPolicy
    --groups mamba     states                       PagedGroupsPolicy
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hbmtwin.validation.vllm.comparison import Comparison
from hbmtwin.validation.vllm.groups import GROUP_POOLS, full
from hbmtwin.validation.vllm.manager import Vllm
from hbmtwin.validation.vllm.planted import PLANTED, plant
from hbmtwin.validation.vllm.planted_groups import PLANTED_GROUPS, plant_groups
from hbmtwin.validation.vllm.policies import GroupsSide, PagedSide, PolicySide, groups_policy, paged_policy
from hbmtwin.validation.vllm.sides import Pool
from hbmtwin.validation.vllm.source import VERSION, NoVllm, StubCalled, unpacked, vllm_core
from hbmtwin.validation.vllm.traffic import Traffic

OPERATIONS = 160_000

FULL = tuple(
    Pool(groups=(full(block_size),), caching=caching, **settings)
    for caching in (False, True)
    for block_size, settings in (
        (4, {"num_blocks": 45, "max_model_len": 120}),
        (4, {"num_blocks": 60, "max_model_len": 200, "watermark": 0.3}),
        (4, {"num_blocks": 90, "max_model_len": 160, "reserve_full_sequence": False}),
        (16, {"num_blocks": 120, "max_model_len": 600, "lookahead": 3}),
        (4, {"num_blocks": 400, "max_model_len": 250, "watermark": 0.01}),
        (16, {"num_blocks": 400, "max_model_len": 1000, "watermark": 0.05}),
        (1, {"num_blocks": 50, "max_model_len": 40}),
        (4, {"num_blocks": 70, "max_model_len": 150, "drafts": 3}),
    )
)
POOLS: dict[str, tuple[Pool, ...]] = {"full": FULL, **GROUP_POOLS}


class Run(NamedTuple):
    """One pool under one policy."""

    kind: str
    policy: str
    pool: Pool
    side: Callable[[Pool, str | None], PolicySide]


def paged_side(pool: Pool, planted: str | None = None) -> PagedSide:
    """The policy of one full-attention group, with a mistake if it is one of its own."""
    policy = paged_policy(pool)
    if planted in PLANTED:
        plant(policy, planted)
    return PagedSide(policy)


def groups_side(pool: Pool, planted: str | None = None) -> GroupsSide:
    """The policy of several groups, with a mistake if it is one of its own."""
    policy = groups_policy(pool)
    if planted in PLANTED_GROUPS:
        plant_groups(policy, planted)
    return GroupsSide(policy)


def runs(groups: str, caching: str, planted: str | None) -> Iterator[Run]:
    """Those asked for; with a planted mistake only of the policy that makes it."""
    for kind in POOLS if groups == "all" else (groups,):
        for pool in POOLS[kind]:
            if caching not in ("both", "on" if pool.caching else "off"):
                continue
            if kind == "full" and planted not in PLANTED_GROUPS:
                yield Run(kind, "paged", pool, paged_side)
            if planted not in PLANTED:
                yield Run(kind, "paged_groups", pool, groups_side)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: equal at every operation; 1: they differ; 2: vLLM's source could not be had or used."""
    mistakes = sorted([*PLANTED, *PLANTED_GROUPS])
    parser = argparse.ArgumentParser(prog="validate_paged", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, help=f"vllm-{VERSION}.tar.gz or its unpacked folder (default: download)")
    parser.add_argument("--groups", choices=(*POOLS, "all"), default="all", help="kinds of layers (%(default)s)")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of all pools together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--caching", choices=("on", "off", "both"), default="both")
    parser.add_argument("--planted", choices=mistakes, help="a mistake to make on purpose: it must be found")
    chosen = parser.parse_args(arguments)
    chosen_runs = list(runs(chosen.groups, chosen.caching, chosen.planted))
    if not chosen_runs:
        parser.error(f"--planted {chosen.planted}: no pool of --groups {chosen.groups} has the policy that makes it")
    each = -(-chosen.operations // len(chosen_runs))
    counts: dict[str, list[int]] = {}
    """Of each kind and policy: operations, pools, pools that differ."""
    met: Counter[str] = Counter()
    try:
        with tempfile.TemporaryDirectory() as folder, vllm_core(unpacked(chosen.vllm, Path(folder))) as core:
            for number, run in enumerate(chosen_runs):
                both = Comparison(run.pool, run.side(run.pool, chosen.planted), Vllm(core, run.pool))
                found = Traffic(both, chosen.seed * 1000 + number).run(each)
                met += both.met
                count = counts.setdefault(f"{run.kind}, {run.policy}", [0, 0, 0])
                for place, more in enumerate((both.operations, 1, found is not None)):
                    count[place] += more
                print(f"{run.policy}, {run.pool}: {both.operations} operations, {found or 'no difference'}", flush=True)
    except (NoVllm, StubCalled) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{count} x {verb}" for verb, count in met.most_common()))
    for name, (operations, pools, differ) in counts.items():
        print(f"{name}: {operations} operations, {differ} of {pools} pools differ")
    differ = sum(differ for _, _, differ in counts.values())
    print(f"vLLM {VERSION}'s own KVCacheManager: {differ} of {len(chosen_runs)} runs differ")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
