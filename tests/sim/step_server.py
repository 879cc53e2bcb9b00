"""A scheduler and a KV policy without an engine: one step at a time, told in a line of text."""

from __future__ import annotations

from string import ascii_uppercase as NAMES
from typing import Any, Self

from hbmtwin.allocators.records import Release
from hbmtwin.workloads.records import Request, user_stream


class StepServer:
    """Requests are called A, B, C in order of their coming.

    A step's line: ``-A`` preempted, ``!A why`` rejected, ``+A`` admitted, ``A:5`` computes five tokens, ``?A`` cannot
    go on, ``A.`` has ended.
    """

    def __init__(self, scheduler: Any, kv: Any) -> None:
        self.scheduler = scheduler
        self.kv = kv
        self.added = 0

    def add(self, prompt: int, output: int, max_tokens: int = 0, *, session: int = -1) -> Self:
        """The prompts of one *session* are alike as far as they go."""
        spans = ((user_stream(session if session >= 0 else 100 + self.added, 0), 0, prompt),)
        r = Request(self.added, self.added, 0, 0, prompt, output, max_tokens or output, spans)
        self.scheduler.add(r, 0)
        self.added += 1
        return self

    def step(self) -> str:
        plan = self.scheduler.schedule(self.kv)
        log = [f"-{NAMES[s.id]}" for s in plan.preempted]
        log += [f"!{NAMES[r.id]} {why}" for r, why in plan.rejected]
        log += [f"+{NAMES[a.sequence.id]}" for a in plan.admitted]
        log += [f"{NAMES[s.id]}:{new}" for s, new in plan.everyone()]
        if plan.exhausted is not None:
            return " ".join([*log, f"?{NAMES[plan.exhausted[0].id]}"])
        self.kv.end_step()
        for f in self.scheduler.commit(plan, 1):
            self.kv.release(f.sequence, Release.FINISH)
            log.append(f"{NAMES[f.sequence.id]}.")
        self.kv.check()
        return " ".join(log)

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    @property
    def waiting(self) -> str:
        everyone = [NAMES[u.sequence.id] for u in self.scheduler.unfinished()]
        return " ".join(everyone[self.scheduler.num_running :])
