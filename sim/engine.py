"""The server in simulated time: one SimPy event a leap, whatever the number of steps and tokens in it.

A leap is a run of steps with the same plan. Its length is the scheduler's ``steady_steps`` and the KV policy's
``horizon``, cut at the next event that SimPy has in its queue (all of them are arrivals): the smallest number of
steps that reaches it. Nothing is applied until a leap ends. Step mode takes every step alone and writes the same
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain

import simpy

from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy, SeenByWaiting
from hbmtwin.allocators.oom import OomFacts, OomRecord, OutOfMemory
from hbmtwin.allocators.records import NO_WORK, KVSequence, Release, Work
from hbmtwin.kernels.records import BatchShape, CostModel
from hbmtwin.sim.batch_watch import BatchWatch
from hbmtwin.sim.books import Books, Entry
from hbmtwin.sim.client_limit import LimitedInbox
from hbmtwin.sim.clock import Last, uncollected
from hbmtwin.sim.engine_config import EngineConfig, Progress
from hbmtwin.sim.forward import Forward
from hbmtwin.sim.inbox import Inbox
from hbmtwin.sim.leap import Leap, batch_of, steps_within_window
from hbmtwin.sim.oom_facts import complete_facts, refused_facts
from hbmtwin.sim.recompute import RecomputeCounter
from hbmtwin.sim.recorder import Counts, Recorder, RequestTimes
from hbmtwin.sim.scheduler import Fail, Finished, Plan, PlansAhead, Scheduler, Unfinished
from hbmtwin.sim.standstill import LiveLockWatch, Standstill, deadlock
from hbmtwin.workloads.records import Request, Source, Status


class Engine:
    """One server: requests in, rows out. :meth:`run` runs it to the end of its traffic or its death."""

    def __init__(
        self,
        config: EngineConfig,
        source: Source,
        scheduler: Scheduler,
        kv: KVPolicy,
        arena: DeviceAllocator,
        forward: Forward,
        cost: CostModel,
        books: Books,
        recorder: Recorder,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.config = config
        self.source = source
        self.scheduler = scheduler
        self._planner = scheduler if isinstance(scheduler, PlansAhead) else None
        """Plans each step before it has the tokens of the one before; None: after that."""
        self.kv = kv
        self._seen_by_waiting = kv if isinstance(kv, SeenByWaiting) else None
        self._steps_allocate = forward.allocates(kv)
        self.arena = arena
        self.forward = forward
        self.cost = cost
        self.books = books
        self.recorder = recorder
        self.progress = progress
        self.env = simpy.Environment(initial_time=0)
        self.oom: OomRecord | None = None
        self.standstill: Standstill | None = None
        self.recompute = RecomputeCounter()
        self._watch = LiveLockWatch()
        self.completed = 0
        self.preemptions = 0
        self.hit_tokens = 0
        self.queried_tokens = 0
        self.events = 0
        self._wake: simpy.Event | None = None
        """What the server waits for, if it does."""
        self._live: dict[int, RequestTimes] = {}
        self._next_tick_ns = 0
        self._batches = BatchWatch()

    def run(self) -> None:
        """Simulate until the traffic ends or the server dies. Raise WorkloadError from a source that is bad."""
        self._take_work()  # loading the weights and making the pool came before time 0, and is no step's work
        traffic, limit = iter(self.source.open()), self.config.max_concurrency
        if limit is None:
            self._inbox = Inbox(self.env, traffic, self._submit)
        else:
            self._inbox = LimitedInbox(self.env, traffic, self._submit, limit)
        self.env.process(self._server())
        self._row(int(self.env.now), self._entry_at())
        with uncollected():
            self.env.run()
        if not self._inbox.closed and self.scheduler.has_work:
            self.standstill = deadlock(self.scheduler.unfinished(), int(self.env.now))
        if self.oom is not None:
            self._close_early(self.oom.time_ns, "server_died")
        elif self.standstill is not None:
            self._close_early(self.standstill.time_ns, self.standstill.kind)
        elif self.recorder.last_row_ns < self.env.now:  # what came last was rejected, and left no row
            self._row(int(self.env.now), self._entry_at())

    def _submit(self, r: Request) -> None:
        self._live[r.id] = RequestTimes(r)
        self.scheduler.add(r, int(self.env.now))
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    # The server

    def _server(self) -> Generator[simpy.Event, None, None]:
        env, scheduler, kv, recorder, inbox = self.env, self.scheduler, self.kv, self.recorder, self._inbox
        keeps, window = kv if self.config.drops_tokens else None, self.config.window
        stuck, start = False, int(env.now)
        ahead: Plan | None = None
        while not inbox.closed:
            if ahead is None and (stuck or not scheduler.has_work):
                stuck = False
                self._wake = env.event()
                yield self._wake
                yield Last(env, 0)
                start = int(env.now)
            recorder.now_ns = start
            before = None
            if recorder.last_row_ns < start:  # else a row of this moment stands already
                before = self._entry_at()
            if ahead is None:
                plan = scheduler.schedule(kv)
                self._note_changes(plan, start)
            else:
                plan = ahead
            if plan.exhausted is not None:
                if before is not None:
                    recorder.row(start, *before, kv)
                self._exhausted(plan)
                continue
            if plan.group is None and not plan.scheduled:
                # Nothing can be scheduled before somebody arrives; a rejection may have brought the next turn in.
                stuck = not (plan.preempted or plan.rejected)
                continue
            changed = self._batches.changed(plan)
            if changed and before is not None:
                recorder.row(start, *before, kv)
            batch = batch_of(plan, keeps, window)
            try:
                self.forward.step(kv, batch)
            except OutOfMemory as error:
                yield Last(env, self._work_ns(self._take_work()))
                self._ran_out(plan, error, start, noted=ahead is not None)
                start = int(env.now)
                continue
            if plan.admitted and ahead is None:
                self._note_admitted(plan, start)
            decodes = plan.decodes
            leap = self._leap(plan, decodes, batch, start, changed)
            waiting = scheduler.num_waiting  # rows within the leap stand before the arrival that may cut it
            end = leap.end_of(leap.steps)
            if self.config.validity is not None:
                self.config.validity.count(batch, leap.steps)
            yield Last(env, end - start)
            ahead = self._finish_leap(plan, decodes, leap, start, end, waiting)
            start = end
        if self.standstill is not None:
            self.standstill = self.standstill._replace(time_ns=int(env.now))

    def _watch_for_standstill(self, plan: Plan | None, gave_way: int, now: int) -> None:
        if self.standstill is None:
            self.standstill = self._watch.gave_way(plan, gave_way, self.scheduler, now)
            self._inbox.closed = self.standstill is not None

    def _leap(self, plan: Plan, decodes: Sequence[KVSequence], batch: BatchShape, start: int, changed: bool) -> Leap:
        """As many steps of the plan as are certain to be alike and reach no further than the next event."""
        work = self._take_work() if self._steps_allocate else self.kv.take_work()
        # A rejection in this plan may have brought the next turn in already.
        alone = self.config.step_mode or plan.rejected or (self._steps_allocate and not self.forward.is_steady(work))
        steady = 0 if alone else self.scheduler.steady_steps(plan)
        if steady and self.config.window:
            steady = min(steady, steps_within_window(plan, self.config.window) - 1)
        if steady and self._seen_by_waiting is not None and self.scheduler.num_waiting:
            steady = self._seen_by_waiting.steps_unseen(decodes, steady)  # who waits may be admitted then
        k = 1 + (self.kv.horizon(decodes, steady) if steady else 0)
        if work is not NO_WORK:
            start += self._work_ns(work)
        leap = Leap(self.cost, batch, start, k, changed)
        return leap if k == 1 else leap.cut_at(self.env.peek())

    def _finish_leap(
        self, plan: Plan, decodes: Sequence[KVSequence], leap: Leap, start: int, now: int, waiting: int
    ) -> Plan | None:
        """*waiting*: requests in the queue when it began. Return the next plan, if it was made ahead."""
        k = leap.steps
        scheduler, recorder = self.scheduler, self.recorder
        recorder.now_ns = now
        running = scheduler.num_running
        # What running sequences held before the first step; each step adds its tokens, and padding is none of them.
        tokens, padded, padding = scheduler.running_tokens, scheduler.padding_tokens, plan.padding_tokens
        planned = 0  # steps of the next plan, whose slots are taken and counted
        if k > 1:
            further, done = len(decodes) - padding, 1
            if self._planner is not None:
                planned = 1
                self.kv.advance(decodes, 1)
            for step, time_ns in leap.rows_within(self._next_tick_ns, recorder.interval_ns):
                self._advance(decodes, step - done)
                done = step
                self._row(time_ns, self._entry(tokens + step * further, padded + step * padding, running, waiting))
            self._advance(decodes, k - done, planned)
            if self._steps_allocate:
                self.forward.repeat(k - 1)
        else:  # leaps of more than one step hold no first token, and groups have theirs
            further = plan.tokens - padding
            scheduled: Iterable[tuple[KVSequence, int]] = plan.scheduled
            if plan.forked:
                scheduled = chain(scheduled, ((s, 0) for s in plan.forked))
            elif plan.discarded:
                scheduled = ((s, new) for s, new in scheduled if s.id in self._live)
            for s, new in scheduled:
                times = self._live[s.id]
                if times.first_token_ns < 0 and s.num_computed_tokens + new == s.num_tokens:
                    times.first_token_ns = now
        if recorder.steps_wanted:
            recorder.leap(start, now - start, k, plan.everyone(), plan.preempted, leap.end_of)
        recorder.step += k
        ahead, before = None, None
        if self._planner is not None:
            last_start = start if k == 1 else leap.end_of(k - 1)
            ahead = self._planner.schedule_ahead(plan, k, self.kv, last_start)
            self._note_changes(ahead, now)
            self._note_admitted(ahead, last_start)
            before = self._entry_at() if self._planner.ending else None
        finished = scheduler.commit(plan, k)
        if finished:  # both sides of the drop: what they held to the end, and what is left
            if before is None:
                before = self._entry(tokens + k * further, padded + k * padding, running, scheduler.num_waiting)
            self._row(now, before)
            for f in finished:
                self._finish(f, now)
        if finished or now >= self._next_tick_ns or (leap.changed and k == 1):
            self._row(now, self._entry_at())
        if self.progress is not None:
            self.events += 1
            if self.events % 256 == 0:
                self.progress(Progress(now / 1e9, self.completed, self.source.total_requests, scheduler.num_running))
        if ahead is None or (ahead.group is None and not ahead.scheduled):
            return None
        return ahead

    def _advance(self, decodes: Sequence[KVSequence], steps: int, planned: int = 0) -> None:
        """Bring memory to where *steps* further steps leave it, *planned* of which have their slots already."""
        if steps:
            self.kv.advance(decodes, steps - planned)
            if self._steps_allocate:
                self.recorder.op_index += self.forward.repeated_operations * steps

    def _row(self, time_ns: int, said: tuple[Entry, Counts]) -> None:
        recorder, (row, counts) = self.recorder, said
        recorder.row(time_ns, row, counts, self.kv)
        if time_ns >= self._next_tick_ns:
            interval = recorder.interval_ns
            self._next_tick_ns = (time_ns // interval + 1) * interval

    def _entry_at(self) -> tuple[Entry, Counts]:
        """What a row of this moment says."""
        scheduler = self.scheduler
        running, waiting = scheduler.num_running, scheduler.num_waiting
        return self._entry(scheduler.running_tokens, scheduler.padding_tokens, running, waiting)

    def _entry(self, tokens: int, padding: int, running: int, waiting: int) -> tuple[Entry, Counts]:
        row = self.books.row(tokens, padding, running)
        parked = self.kv.usage().parked_sessions if self.config.keeps_parked else 0
        return row, (running, waiting, parked, self.preemptions, self.hit_tokens, self.queried_tokens)

    def _take_work(self) -> Work:
        taken = self.kv.take_work()
        for allocator in self.books.allocators:
            if (work := allocator.take_work()) is not NO_WORK:
                taken = taken.plus(work)
        return taken

    def _work_ns(self, work: Work) -> int:
        if work is NO_WORK or not any(work):
            return 0
        return self.cost.work_ns(
            driver_calls=work.driver_calls,
            syncs=work.syncs,
            copied_bytes=work.copied_bytes,
            swapped_bytes=work.swapped_bytes,
        )

    # What happens to requests

    def _note_admitted(self, plan: Plan, now: int) -> None:
        """Of a step that was carried out: in one that failed nobody was admitted."""
        for request, sequence, hit in plan.admitted:
            times = self._live[sequence.id]
            if times.scheduled_ns < 0:
                times.scheduled_ns = now
                times.cached_tokens = hit
                self.hit_tokens += hit
                self.queried_tokens += request.prompt_tokens
            self.recompute.admitted(sequence, hit, now, self.scheduler.running_tokens)

    def _note_changes(self, plan: Plan, now: int) -> None:
        """Who was preempted or rejected in this step."""
        if not (plan.preempted or plan.rejected):
            return
        for s in plan.preempted:
            self._live[s.id].preemptions += 1
            self.preemptions += 1
            self.recompute.preempted(s, now, self.scheduler.running_tokens)
        for s in plan.dropped:
            self.recompute.ended(s, s.num_tokens, now, self.scheduler.running_tokens)
        for request, reason in plan.rejected:  # a preempted one loses what it had generated
            self._end(request, now, 0, Status.REJECTED, reason)
            if self.config.keeps_parked:  # the turn that was to adopt its history will not come
                ended = KVSequence(id=-1, session=request.session, turn=request.turn, num_tokens=0, max_tokens=0)
                self.kv.release(ended, Release.DROP)
        if plan.preempted:
            self._watch_for_standstill(plan, len(plan.preempted), now)

    def _finish(self, f: Finished, now: int) -> None:
        self.completed += 1
        self._count_end(f, now)
        computed = f.sequence.num_computed_tokens
        dropped = computed - self.kv.kept(computed) if self.config.counts_dropped else 0
        following = self._end(f.request, now, f.output_tokens, Status.COMPLETED, "", dropped)
        park = False
        if self.config.keeps_parked and self.config.between_turns == "keep":
            park = following.session == f.request.session if following else f.request.has_next
        self.kv.release(f.sequence, Release.PARK if park else Release.FINISH)

    def _end(
        self, r: Request, now: int, output_tokens: int, status: Status, reason: str, dropped_tokens: int = 0
    ) -> Request | None:
        self.recorder.end_request(self._live.pop(r.id), now, output_tokens, status, reason, dropped_tokens)
        following = self.source.next_turn(r, now, status)
        self._inbox.left()
        if following is not None:
            self._inbox.follow(following, now)
        return following

    # Out of memory

    def _ran_out(self, plan: Plan, error: OutOfMemory, start: int, *, noted: bool) -> None:
        """A step that was under way found no memory: the server dies, or the sequence that asked gives way.

        An activation or a workspace that does not fit is nobody's: it ends the process whatever ``memory.oom`` says.
        """
        owner = error.facts.owner
        if self.config.oom == "stop" or owner < 0:
            if not noted:
                self._note_admitted(plan, start)
            self._die(error.facts, error.torch_message)
            return
        self.forward.abort()
        self._give_way(plan, owner, Fail(self.config.oom))

    def _exhausted(self, plan: Plan) -> None:
        assert plan.exhausted is not None
        s, refused = plan.exhausted
        if self.config.oom == "stop":
            facts = refused_facts(
                s,
                refused,
                self.arena,
                self.books,
                limit_bytes=self.config.arena_limit_bytes,
                fixed_pool=self.config.fixed_pool,
            )
            self.kv.abort_step()  # what was reserved before the refusal is not computed any more
            self._die(facts)
            return
        self._give_way(plan, s.id, Fail(self.config.oom))

    def _give_way(self, plan: Plan, owner: int, how: Fail) -> None:
        now = int(self.env.now)
        failed = self.scheduler.fail(plan, self.kv, owner, how)
        newcomers = {a.request.id for a in plan.admitted}  # who have computed nothing
        for u in failed.rejected:
            if u.request.id not in newcomers:
                self._count_end(u, now)
            self._end(u.request, now, u.output_tokens, Status.REJECTED, "out_of_memory")
        for u in failed.preempted:
            self._live[u.request.id].preemptions += 1
            self.preemptions += 1
            self.recompute.preempted(u.sequence, now, self.scheduler.running_tokens)
        if failed.preempted:
            self._watch_for_standstill(None, len(failed.preempted), now)
        for f in failed.finished:
            self._finish(f, now)
        self._batches.forget()
        self._row(now, self._entry_at())

    def _die(self, facts: OomFacts, torch_message: str = "") -> None:
        """The process dies: keep the record, the last row and the map of this moment."""
        now = int(self.env.now)
        complete = complete_facts(facts, self.books, self.forward, self.arena)
        self.oom = OomRecord.of(complete, time_ns=now, request=facts.owner, torch_message=torch_message)
        self._inbox.closed = True
        self.recorder.now_ns = now
        # The step was not committed: the tokens that are physically there are the policy's to count.
        scheduler, usage = self.scheduler, self.kv.usage()
        padding = scheduler.padding_tokens
        tokens = (usage.token + usage.dropped + usage.shared) // self.books.token_bytes - padding
        self.recorder.row(now, *self._entry(tokens, padding, scheduler.num_running, scheduler.num_waiting), self.kv)
        self.recorder.address_map(now, self.kv)

    def _count_end(self, e: Finished | Unfinished, now: int) -> None:
        tokens = e.request.prompt_tokens + e.output_tokens
        self.recompute.ended(e.sequence, tokens, now, self.scheduler.running_tokens)

    def _close_early(self, now: int, why: str) -> None:
        """Write the rows of requests that the end of the run cut off, and of those that were never submitted."""
        if self.recorder.last_row_ns < now:
            self._row(int(self.env.now), self._entry_at())
        generated = {u.request.id: u.output_tokens for u in self.scheduler.unfinished()}
        following: list[Request] = []
        for times in self._live.values():  # also those whose rejection was not answered yet
            r = times.request
            self.recorder.end_request(times, now, generated.get(r.id, 0), Status.FAILED, why)
            if (after := self.source.next_turn(r, now, Status.FAILED)) is not None:
                following.append(after)
        for first in chain(self._inbox.to_come.values(), following, self._inbox.traffic):
            unsent: Request | None = first
            while unsent is not None:
                self.recorder.end_request(RequestTimes(unsent), -1, 0, Status.UNFINISHED, "not_submitted")
                unsent = self.source.next_turn(unsent, now, Status.UNFINISHED)
