"""A scheduler that live-locks: when a block is short, whoever holds most gives way.

It looks like a good idea, as that frees most at once. But whoever holds most is the one that is about to be ready: long
prompts, computed in chunks side by side where only one of them fits, undo one another for ever. vLLM lets the last
admitted give way, so that the first one always goes on; that keeps its servers, however slow, from standing still.
"""

from __future__ import annotations

from typing import ClassVar

from hbmtwin.sim.scheduler import schedulers
from hbmtwin.sim.schedulers.vllm import VllmScheduler


@schedulers.register("largest_gives_way")
class LargestGivesWay(VllmScheduler):
    """vLLM's scheduler in all but one thing: who holds most KV gives way."""

    name: ClassVar[str] = "largest_gives_way"

    def _victim(self) -> int:
        return max(range(len(self._running)), key=lambda place: self._running[place].sequence.num_computed_tokens)
