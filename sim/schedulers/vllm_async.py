"""vLLM's asynchronous scheduling: a step is planned while the one before it is computed.

::

    device      | step 1        | step 2        | step 3        |
    scheduler   |1 2            |  3            |  4            |       plans step 3 as step 2 begins
                        ^ comes in step 1: not in step 2, which is planned, but in step 3
    ends in 1             by max_tokens: foreseen, not in step 2; its blocks and its place are free for step 3
                          by itself:     in step 2 as well, which computes a token of it that nobody wants

It is ``AsyncScheduler`` of vLLM 0.27.1, and the engine core's queue of two batches. There, plans and outcomes take
turns: plan 3, the tokens of 1, plan 4, the tokens of 2. Here, plan 3 is made when step 2 has been computed, *before*
its tokens are looked at and with none of the requests that came while it was: the same order, hence the same plans,
block ids and keys, at one moment instead of two. What differs from a plan that is made later:

- who comes in a step waits for the end of the next one;
- who ends holds its blocks, and counts as running, for one plan more, and may be preempted in it;
- who is preempted still gets the token that it had under way, which may be its last one;
- a block whose last token is not known yet gets its key a plan later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import ClassVar

from hbmtwin.allocators.contract import KeysFollow, KVPolicy, LetsRest
from hbmtwin.sim.scheduler import Entry, Finished, Plan, SchedulerConfig, Unfinished
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.workloads.records import Request


class AsyncVllmScheduler(VllmScheduler):
    """``vllm`` with ``scheduler.async_scheduling``; its KV policy must be one whose keys can follow (``KeysFollow``).

    With ``memory.oom = "preempt"`` only: a plan cannot be taken back once the next one is made.
    """

    name: ClassVar[str] = "vllm"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._arrived: deque[tuple[int, Entry]] = deque()
        """Who came, and when, and is in no plan's queue yet."""
        self._ending: list[Entry] = []
        """Who ends with the step behind which the last plan was made, in its order."""
        self._sampled: dict[int, Entry] = {}
        """Of those not in the group, whose newest token came from that step: not known when the next one is planned."""
        self._resting: list[tuple[int, Entry]] = []
        """Those of ``_ending`` that left the group, with their places in it."""
        self._under_way: dict[int, int] = {}
        """Of those not in the group the tokens that this step computes of each."""
        self._now_ns = 0
        self._ahead = Plan([])
        """The last plan."""
        self._keys: KeysFollow | None = None
        self._rests: LetsRest | None = None

    @property
    def num_running(self) -> int:
        """Sequences that were admitted and have not ended."""
        return len(self._group.members) + len(self._resting) + len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue or on their way into it, preempted ones included."""
        return len(self._waiting) + len(self._arrived)

    @property
    def ending(self) -> bool:
        """Whether somebody ends with the step behind which the last plan was made."""
        return bool(self._ending)

    def add(self, r: Request, now_ns: int) -> None:
        """Queue a request, or note its rejection for the next plan; plans made for an earlier moment pass over it."""
        self._now_ns = now_ns
        super().add(r, now_ns)

    def _enqueue(self, entry: Entry) -> None:
        self._arrived.append((self._now_ns, entry))

    def _queued(self) -> Iterable[Entry]:
        return chain(self._waiting, (entry for _, entry in self._arrived))

    def _let_in(self, until_ns: int) -> None:
        arrived = self._arrived
        while arrived and arrived[0][0] <= until_ns:
            self._waiting.append(arrived.popleft()[1])

    # -- plans -------------------------------------------------------------------------------------------------------

    def schedule(self, kv: KVPolicy) -> Plan:
        """The first step after a rest: nothing is computed, all that came is known."""
        if self._kv is not kv:
            assert isinstance(kv, KeysFollow)
            self._keys = kv
            self._rests = kv if isinstance(kv, LetsRest) else None
            kv.unsampled, kv.under_way = self._sampled.keys(), self._under_way
        self._let_in(self._now_ns)
        self._sampled.clear()
        self._ending.clear()
        self._under_way.clear()
        return self._planned(kv)

    def schedule_ahead(self, p: Plan, k: int, kv: KVPolicy, now_ns: int) -> Plan:
        """The step behind *k* steps of *p*. O(those that are not in the group + admitted), O(running) if one ends."""
        self._count(p, k)
        self._let_in(now_ns)
        if self._together is not None and self._running:
            self._join()
        return self._planned(kv)

    def _planned(self, kv: KVPolicy) -> Plan:
        self._most_running -= len(self._resting)
        plan = self._ahead = super().schedule(kv)
        self._most_running += len(self._resting)
        self.running_tokens += plan.tokens  # from now on: the policy counts them as well
        return plan

    def _count(self, p: Plan, k: int) -> None:
        """What *k* steps of *p* computed, and sampled but for the very last token of those that are known to end."""
        self._sampled.clear()
        self._ending.clear()
        self._under_way.clear()
        if k > 1:
            self.running_tokens += (k - 1) * len(p.decodes)
        scheduled = p.scheduled
        if (group := p.group) is not None:
            if group.steps_left > k:
                group.go(k)
            elif not self._rest(k):
                scheduled = p.everyone()
                self._break_up()
        for s, new in scheduled:
            entry = self._entries.get(s.id)
            if entry is None:
                continue  # it had ended already
            self._under_way[s.id] = new
            s.num_computed_tokens += new + k - 1
            if s.num_computed_tokens + 1 - k != s.num_tokens:
                continue
            self._sampled[s.id] = entry
            s.num_tokens += k
            if s.num_tokens >= entry.final_tokens:
                self._ending.append(entry)
                if s.num_tokens == s.max_tokens:
                    s.num_tokens -= 1  # vLLM knows it: nothing is left to plan for it

    def _rest(self, k: int) -> bool:
        """Let those of the group who end after *k* steps leave it, if that changes nothing for the others: if it is
        known that they end, nobody of the group may have to give way, and others stay in it. O(members)."""
        kv, group = self._rests, self._group
        if kv is None or self._by_priority or kv.free_blocks < len(group.members):
            return False
        resting = [(place, self._entries[s.id]) for place, s in group.places(k)]
        foreseen = all(entry.final_tokens == entry.sequence.max_tokens for _, entry in resting)
        if not foreseen or len(resting) == len(group.members):
            return False
        group.go(k)
        for _, entry in resting:
            kv.rest(entry.sequence)
            self._sampled[entry.sequence.id] = entry
            self._ending.append(entry)
        self._resting = resting
        return True

    def _break_up(self) -> None:
        self._sampled.update((s.id, self._entries[s.id]) for s in self._group)
        super()._break_up()

    def _join(self) -> None:
        """Those in front that sampled, were not the first token, and go on."""
        group, running, joining = self._group, self._running, 0
        room = self.config.max_num_batched_tokens - len(group.members)
        while joining < len(running) and joining < room:
            entry = running[joining]
            s = entry.sequence
            if s.id not in self._sampled or not s.num_computed_tokens + 1 == s.num_tokens < entry.final_tokens:
                break
            del self._sampled[s.id]
            group.join(s, entry.final_tokens)
            joining += 1
        del running[:joining]

    def steady_steps(self, p: Plan) -> int:
        """As without planning ahead; 0 if the next plan knows of what this one did not."""
        if p.discarded or self._arrived or (self._ending and self._waiting):
            return 0
        return super().steady_steps(p)

    def unfinished(self) -> Iterator[Unfinished]:
        """Running requests, those who end among them, then waiting ones."""
        if self._resting:
            self._group.fold()
            resting = [(place, entry.sequence) for place, entry in self._resting]
            for _, s in sorted([*self._group.places(), *resting], key=lambda one: one[0]):
                yield Unfinished(self._entries[s.id].request, s, self._entries[s.id].output_tokens)
            yield from super(VllmScheduler, self).unfinished()
        else:
            yield from super().unfinished()

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def commit(self, p: Plan, k: int) -> list[Finished]:
        """The tokens of the step behind which the last plan was made are known; who has all of them leaves."""
        assert self._keys is not None
        ending = self._ending
        for entry in ending:
            entry.sequence.num_tokens = entry.final_tokens
        for entry in self._sampled.values():
            self._keys.cache_blocks(entry.sequence)
        if not ending:
            return []
        self._resting.clear()
        finished = self._finish(ending)
        self._discard()
        return finished

    def _discard(self) -> None:
        """Take out of the queue who gave way in the last plan, and note who is computed for nothing in it. O(scheduled
        one by one)."""
        gone = {entry.sequence.id: entry for entry in self._ending}
        for s in self._ahead.preempted:
            if s.id in gone:
                self._waiting.remove(gone[s.id])
        self._ahead.discarded = [s for s, _ in self._ahead.scheduled if s.id in gone]
        self.running_tokens -= len(self._ahead.discarded)
