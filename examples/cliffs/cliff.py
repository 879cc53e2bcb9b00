"""The sweep: one load, three ways to share a pool, and pools that shrink."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from joblib import Parallel, delayed
from largest_gives_way import LargestGivesWay

from hbmtwin import Scenario, run

HERE = Path(__file__).parent
BLOCK_MIB = 16
BLOCKS = (640, 520, 460, 420, 380, 340, 280, 220, 160, 110, 70, 45, 34)
"""Pools; the smallest holds one longest request (32 blocks), a spare and the null block."""
RULES: dict[str, tuple[str, ...]] = {
    "whole prompt": ("kv_cache.version=0.27",),
    "first chunk": ("kv_cache.version=0.18", "scheduler.long_prefill_token_threshold=512"),
    "largest gives way": (
        "kv_cache.version=0.18",
        "scheduler.long_prefill_token_threshold=512",
        f"scheduler.policy={LargestGivesWay.name}",
    ),
}
"""Who begins, and who gives way: vLLM 0.27 (a request begins when its whole prompt fits, the last admitted gives way);
vLLM 0.18 with chunks of 512 tokens (when its first chunk fits); the same, but whoever holds most gives way."""


class Point(NamedTuple):
    """What a pool made of the load."""

    rule: str
    blocks: int
    preemptions: int
    ttft_p99_s: float
    recomputed_share: float
    verdict: str
    """``held``, ``preempted``, ``thrashing`` or ``live-lock``: the worst that it came to."""
    end_s: float
    completed: int

    @property
    def pool_gib(self) -> float:
        """Size of the pool."""
        return self.blocks * BLOCK_MIB / 1024


def point(rule: str, blocks: int) -> Point:
    """Run one rule over one pool."""
    overrides = (f"kv_cache.options={{num_blocks={blocks}}}", *RULES[rule])
    s = run(Scenario.load(HERE / "cliffs.toml", overrides=overrides)).summary
    verdict = "preempted" if s["preemptions"] else "held"
    if s["thrashing"] is not None:
        verdict = "thrashing"
    if s["standstill"] is not None:
        assert s["standstill"]["kind"] == "live_lock"
        verdict = "live-lock"
    return Point(
        rule=rule,
        blocks=blocks,
        preemptions=s["preemptions"],
        ttft_p99_s=s["ttft_s"]["p99"],
        recomputed_share=s["recomputed_share"],
        verdict=verdict,
        end_s=s["makespan_s"],
        completed=s["requests_completed"],
    )


def sweep(blocks: tuple[int, ...] = BLOCKS) -> list[Point]:
    """Every rule over every pool, the largest pool first."""
    return list(Parallel(n_jobs=-1)(delayed(point)(rule, size) for rule in RULES for size in blocks))
