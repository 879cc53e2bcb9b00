"""Two schedulers with a block manager each, told the same: compared at every step.

::

    arrive ...  ->  schedule  ->  who computes how many tokens, who came in and with what hits, who was preempted,
                                  who runs and who waits, in order; every block table; the free queue
                ->  compute   ->  who ended; who runs then; the free queue after it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from hbmtwin.validation.vllm.sides import Pool, Tables
from hbmtwin.workloads.records import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One configuration of both sides."""

    pool: Pool
    max_num_seqs: int
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False

    @property
    def in_flight_tokens(self) -> int:
        """Most tokens that are scheduled and not yet settled, by which groups with windows are bounded."""
        return self.pool.max_num_batched_tokens * (2 if self.async_scheduling else 1)

    def __str__(self) -> str:
        told = (
            f"{self.scheduling_policy}, {self.max_num_seqs} at once, {self.pool.max_num_batched_tokens} tokens a step"
        )
        told += f", {self.long_prefill_token_threshold} of a prompt" if self.long_prefill_token_threshold else ""
        told += "" if self.enable_chunked_prefill else ", prompts whole"
        told += ", planned ahead" if self.async_scheduling else ""
        return f"{told}, {self.pool}"


class Scheduled(NamedTuple):
    """What a step does, and how it leaves the queues and the memory. Requests by id."""

    scheduled: tuple[tuple[int, int], ...]
    """``(request, tokens)`` in the order of the step."""
    admitted: tuple[tuple[int, int], ...]
    """``(request, hit tokens)``, in order; preempted ones that come again are among them."""
    preempted: tuple[int, ...]
    """In ascending order: vLLM has a set of them, and the queue shows in which order they came back."""
    rejected: tuple[int, ...]
    """None, of traffic in which everything can run."""
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    tables: tuple[Tables, ...]
    """Of those that run, in their order."""
    free_queue: tuple[int, ...]


class Computed(NamedTuple):
    """What a step leaves behind."""

    finished: tuple[int, ...]
    running: tuple[int, ...]
    free_queue: tuple[int, ...]


class SchedulerSide(Protocol):
    """A scheduler and its block manager."""

    def arrive(self, r: Request, tokens: Sequence[int]) -> None:
        """A new request; *tokens* are those of its prompt and of its output."""
        ...

    def schedule(self) -> Scheduled:
        """Plan the next step."""
        ...

    def compute(self) -> Computed:
        """Carry it out: a token is sampled for each that has none left to compute."""
        ...


class StepsDiffer(Exception):
    """The first difference of a run."""

    def __init__(self, step: int, what: str, ours: object, theirs: object) -> None:
        super().__init__(f"step {step}: {what} is {ours} here and {theirs} there")


@dataclass(slots=True)
class Steps:
    """Both sides of one server, and what was met."""

    ours: SchedulerSide
    theirs: SchedulerSide
    steps: int = 0
    met: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0

    def arrive(self, r: Request, tokens: Sequence[int]) -> None:
        """On both sides."""
        self.ours.arrive(r, tokens)
        self.theirs.arrive(r, tokens)
        self.unfinished += 1

    def step(self) -> tuple[int, ...]:
        """One step of both; who ended with it. Raise StepsDiffer."""
        self.steps += 1
        self._plan()
        return self._compute()

    def _compute(self) -> tuple[int, ...]:
        after = self.ours.compute()
        self._same(after, self.theirs.compute())
        self.unfinished -= len(after.finished)
        self.met["finished"] += len(after.finished)
        return after.finished

    def _plan(self) -> Scheduled:
        plan = self.ours.schedule()
        self._same(plan, self.theirs.schedule())
        new = dict(plan.admitted)
        self.met["scheduled"] += len(plan.scheduled)
        self.met["admitted"] += len(plan.admitted)
        self.met["admitted with hits"] += sum(hit > 0 for hit in new.values())
        self.met["preempted"] += len(plan.preempted)
        self.met["rejected"] += len(plan.rejected)
        self.met["prompts and decodes in a step"] += bool(new) and len(new) < len(plan.scheduled)
        self.met["passed over"] += len(plan.running) - len(plan.scheduled)
        return plan

    def _same(self, ours: Scheduled | Computed, theirs: Scheduled | Computed) -> None:
        for what, mine, real in zip(ours._fields, ours, theirs, strict=True):
            if mine != real:
                raise StepsDiffer(self.steps, what, mine, real)
