"""Holds the paged KV policy to vLLM's own KVCacheManager: one random traffic, compared at every operation.

Both sides get the same verbs (look-up, admission, chunk, decode, free, preempt, reset) and their answers are compared
as they come: hit tokens, granted or refused, block ids of the sequence, free blocks; now and then the whole free queue.
Tokens are a fixed function of stream and position, so that equal spans are equal tokens on vLLM's side.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Release, Span
from hbmtwin.validation.vllm_planted import PLANTED, plant
from hbmtwin.validation.vllm_source import VERSION, NoVllm, StubCalled, unpacked, vllm_core

STREAM_TOKENS = 1_000_000
"""Token ids of one stream: position + this many times the stream."""
QUEUE_EVERY = 50
"""Operations between two comparisons of the whole free queue."""
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
OPERATIONS = 120_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One configuration of both sides."""

    num_blocks: int
    block_size: int
    caching: bool
    watermark: float = 0.0
    reserve_full_sequence: bool = True
    max_model_len: int = 512
    lookahead: int = 0


POOLS = tuple(
    Pool(caching=caching, **settings)
    for caching in (False, True)
    for settings in (
        {"num_blocks": 45, "block_size": 4, "max_model_len": 120},
        {"num_blocks": 60, "block_size": 4, "max_model_len": 200, "watermark": 0.3},
        {"num_blocks": 90, "block_size": 4, "max_model_len": 160, "reserve_full_sequence": False},
        {"num_blocks": 120, "block_size": 16, "max_model_len": 600, "lookahead": 3},
        {"num_blocks": 400, "block_size": 4, "max_model_len": 250, "watermark": 0.01},
        {"num_blocks": 400, "block_size": 16, "max_model_len": 1000, "watermark": 0.05},
        {"num_blocks": 50, "block_size": 1, "max_model_len": 40},
    )
)


@dataclass(frozen=True, slots=True)
class Found:
    """The first difference of a run, with the state of both sides after it."""

    operation: int
    verb: str
    what: str
    ours: object
    vllm: object
    ours_state: str
    vllm_state: str

    def __str__(self) -> str:
        return (
            f"operation {self.operation}, {self.verb}: {self.what} is {self.ours} here and {self.vllm} in vLLM\n"
            f"  ours: {self.ours_state}\n  vLLM: {self.vllm_state}"
        )


class Differs(Exception):
    """Carries the first difference out of the traffic."""

    def __init__(self, found: Found) -> None:
        super().__init__(str(found))
        self.found = found


@dataclass(slots=True, eq=False)
class Pair:
    """One sequence as both sides have it."""

    ours: KVSequence
    vllm: Any
    tokens: Sequence[int]
    """Of its prompt and all the output it may get."""
    prompt: int
    length: int
    """Tokens at which it ends by itself."""

    @property
    def decodes(self) -> bool:
        """Whether all but its last token are computed."""
        return self.ours.num_computed_tokens == self.ours.num_tokens - 1


def token_ids(spans: Sequence[Span]) -> list[int]:
    """Equal pieces of a stream give equal tokens, different ones give different tokens."""
    return [
        int(stream) * STREAM_TOKENS + place for stream, start, length in spans for place in range(start, start + length)
    ]


def cut(spans: Sequence[Span], tokens: int) -> list[Span]:
    """The spans of the first *tokens*."""
    kept: list[Span] = []
    for stream, start, length in spans:
        taken = min(length, tokens)
        if taken:
            kept.append((stream, start, taken))
        tokens -= taken
    return kept


def spans_tokens(spans: Sequence[Span]) -> int:
    """Tokens of all of them."""
    return sum(length for _, _, length in spans)


class Vllm:
    """vLLM's manager of one full-attention group, told what the paged policy is told."""

    def __init__(self, core: Mapping[str, Any], pool: Pool) -> None:
        self.core, self.pool = core, pool
        interface = core["kv_cache_interface"]
        spec = interface.FullAttentionSpec(block_size=pool.block_size, num_kv_heads=1, head_size=1, dtype=None)
        config = interface.KVCacheConfig(
            num_blocks=pool.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self.sha256 = core["hashing"].sha256
        core["kv_cache_utils"].init_none_hash(self.sha256)
        self.manager = core["kv_cache_manager"].KVCacheManager(
            config,
            max_model_len=pool.max_model_len,
            scheduler_block_size=pool.block_size,
            hash_block_size=pool.block_size,
            enable_caching=pool.caching,
            watermark=pool.watermark,
        )
        self.hasher = core["kv_cache_utils"].get_request_block_hasher(pool.block_size, self.sha256)
        self.status = core["request"].RequestStatus

    def request(self, name: int, prompt: Sequence[int]) -> Any:
        """A new one."""
        asked = SimpleNamespace(max_tokens=self.pool.max_model_len, extra_args=None, skip_reading_prefix_cache=None)
        return self.core["request"].Request(
            str(name), list(prompt), asked, None, arrival_time=0.0, block_hasher=self.hasher
        )

    def blocks(self, request: Any) -> tuple[int, ...]:
        """Its table."""
        (ids,) = self.manager.get_block_ids(request.request_id)
        return tuple(ids)

    def free(self) -> int:
        """Free blocks."""
        return int(self.manager.block_pool.get_num_free_blocks())

    def queue(self) -> tuple[int, ...]:
        """The free queue from its head."""
        return tuple(block.block_id for block in self.manager.block_pool.free_block_queue.get_all_free_blocks())


def policy_of(pool: Pool) -> PagedPolicy:
    """Ours."""
    arena = PooledAllocator(HbmDriver(64 << 20), PooledConfig(limit_bytes=64 << 20))
    config = PagedConfig(
        num_blocks=pool.num_blocks,
        max_model_len=pool.max_model_len,
        block_size=pool.block_size,
        watermark=pool.watermark,
        reserve_full_sequence=pool.reserve_full_sequence,
        enable_prefix_caching=pool.caching,
    )
    return PagedPolicy(LAYOUT, arena, config)


@dataclass(slots=True)
class Comparison:
    """Random traffic on one pool, and what it met."""

    core: Mapping[str, Any]
    pool: Pool
    seed: int
    planted: str | None = None
    """A mistake that ours makes on purpose."""
    operations: int = 0
    met: Counter[str] = field(default_factory=Counter)
    ours: PagedPolicy = field(init=False)
    vllm: Vllm = field(init=False)
    random: random.Random = field(init=False)
    running: list[Pair] = field(default_factory=list)
    waiting: list[Pair] = field(default_factory=list)
    told: list[list[Span]] = field(default_factory=list)
    """Spans of prompts and of whole sequences that later ones repeat and extend."""
    streams: int = 0
    names: int = 0

    def __post_init__(self) -> None:
        self.ours = policy_of(self.pool)
        if self.planted is not None:
            plant(self.ours, self.planted)
        self.vllm = Vllm(self.core, self.pool)
        self.random = random.Random(self.seed)

    # -- comparing ---------------------------------------------------------------------------------------------------

    def same(self, verb: str, what: str, ours: object, vllm: object) -> None:
        """Raise Differs unless they are equal."""
        if ours != vllm:
            held = [(pair.ours.id, self.ours.block_ids(pair.ours)) for pair in self.running]
            real = [(pair.ours.id, self.vllm.blocks(pair.vllm)) for pair in self.running]
            states = (
                f"free {self.free()} {self.queue()}, held {held}",
                f"free {self.vllm.free()} {self.vllm.queue()}, held {real}",
            )
            raise Differs(Found(self.operations, verb, what, ours, vllm, *states))

    def done(self, verb: str, *pairs: Pair) -> None:
        """Count one operation; compare tables of *pairs*, free blocks, and now and then the queue."""
        self.operations += 1
        self.met[verb] += 1
        for pair in pairs:
            self.same(verb, f"table of {pair.ours.id}", self.ours.block_ids(pair.ours), self.vllm.blocks(pair.vllm))
        self.same(verb, "free blocks", self.free(), self.vllm.free())
        if not self.operations % QUEUE_EVERY:
            self.same(verb, "free queue", self.queue(), self.vllm.queue())
            self.met["queue compared"] += 1

    def free(self) -> int:
        """Ours, by the books."""
        usage = self.ours.usage()
        return int((usage.pool + usage.cached) // (self.pool.block_size * LAYOUT.token_bytes)) - 1

    def queue(self) -> tuple[int, ...]:
        """Our free queue: what one sequence would get that took all of it."""
        twin = copy.deepcopy(self.ours)
        taken: list[int] = []
        size, longest = self.pool.block_size, self.pool.max_model_len
        most = -(-longest // size)
        for probe in range(-1, -2 - self.free() // most, -1):
            blocks = min(most, self.free() - len(taken))
            if blocks:
                s = KVSequence(id=probe, session=probe, turn=0, num_tokens=1, max_tokens=longest)
                twin.reserve(s, min(blocks * size, longest))
                taken += twin.block_ids(s)
        return tuple(taken)

    # -- one operation each ------------------------------------------------------------------------------------------

    def admit(self, pair: Pair, budget: int) -> int:
        """Look up and admit; the tokens scheduled, hits included, or 0 if both refuse."""
        hit = self.ours.lookup(pair.ours)
        blocks, real_hit, _ = self.vllm.manager.get_computed_blocks(pair.vllm)
        self.same("look-up", f"hit of {pair.ours.id}", hit, real_hit)
        self.done("look-up")
        self.met["hits"] += hit > 0
        new = min(pair.ours.num_tokens - hit, budget)
        others = bool(self.running)
        granted = isinstance(
            self.ours.reserve(
                pair.ours, new, hit=hit, lookahead=self.pool.lookahead, admitting=True, others_running=others
            ),
            Granted,
        )
        real = self.vllm.manager.allocate_slots(
            pair.vllm,
            new,
            real_hit,
            blocks,
            num_lookahead_tokens=self.pool.lookahead,
            full_sequence_must_fit=self.pool.reserve_full_sequence,
            has_scheduled_reqs=others,
        )
        verb = "admission" if granted else "refused admission"
        self.same(verb, f"grant to {pair.ours.id}", granted, real is not None)
        self.done(verb, pair)
        if granted:
            pair.vllm.status = self.vllm.status.RUNNING
            pair.ours.num_computed_tokens = pair.vllm.num_computed_tokens = 0
        return hit + new if granted else 0

    def grow(self, pair: Pair, new: int) -> bool:
        """A chunk or a decode of a running one; whether both granted it."""
        granted = isinstance(
            self.ours.reserve(pair.ours, new, lookahead=self.pool.lookahead, others_running=True), Granted
        )
        real = self.vllm.manager.allocate_slots(pair.vllm, new, num_lookahead_tokens=self.pool.lookahead)
        verb = ("decode" if new == 1 else "chunk") if granted else "refused growth"
        self.same(verb, f"grant to {pair.ours.id}", granted, real is not None)
        self.done(verb, pair)
        return granted

    def leap(self, limit: int) -> None:
        """Decode steps of all that run: at once here, one by one in vLLM."""
        steps = self.ours.horizon([pair.ours for pair in self.running], limit)
        if not steps:
            return
        self.ours.advance([pair.ours for pair in self.running], steps)
        for _ in range(steps):
            for pair in self.running:
                real = self.vllm.manager.allocate_slots(pair.vllm, 1)
                self.same("leap", f"grant to {pair.ours.id}", True, real is not None)
            for pair in self.running:
                pair.ours.num_computed_tokens += 1
                pair.vllm.num_computed_tokens += 1
                pair.vllm.append_output_token_ids(pair.tokens[pair.ours.num_tokens])
                pair.ours.num_tokens += 1
        self.done("leap", *self.running)

    def preempt(self, pair: Pair) -> None:
        """As vLLM's scheduler does: nothing is computed any more, and it waits in front."""
        self.running.remove(pair)
        self.ours.release(pair.ours, Release.PREEMPT)
        self.vllm.manager.free(pair.vllm)
        pair.vllm.status = self.vllm.status.PREEMPTED
        pair.ours.num_computed_tokens = pair.vllm.num_computed_tokens = 0
        self.waiting.insert(0, pair)
        self.done("preemption", pair)

    def finish(self, pair: Pair) -> None:
        """It ends, and may be repeated or extended later."""
        self.running.remove(pair)
        self.ours.release(pair.ours, Release.FINISH)
        self.vllm.manager.free(pair.vllm)
        self.told.append(cut(pair.ours.spans, pair.ours.num_tokens))
        self.done("free", pair)

    def reset(self) -> None:
        """Both forget their keys, or both refuse because something runs."""
        ours = self.ours.reset_prefix_cache()
        self.same("reset", "answer", ours, self.vllm.manager.reset_prefix_cache())
        self.done("reset" if ours else "refused reset")

    # -- traffic -----------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A new one: fresh, or a repeat, an extension or a part of what was told before, often of exact blocks."""
        choose, size, longest = self.random, self.pool.block_size, self.pool.max_model_len
        spans: list[Span] = []
        kind = choose.choice(["fresh", "repeat", "repeat", "extend", "extend", "part"]) if self.told else "fresh"
        if kind != "fresh":
            spans = list(choose.choice(self.told[-12:]))
            if kind == "part":
                whole = choose.randint(1, max(1, spans_tokens(spans) // size)) * size
                spans = cut(spans, whole + choose.choice([-1, 0, 0, 1]))
        spans = cut(spans, longest - 1)
        if kind in ("fresh", "extend") or not spans:
            room = longest - 1 - spans_tokens(spans)
            more = choose.choice([choose.randint(1, 6) * size, choose.randint(1, max(1, longest // 3))])
            if min(more, room) > 0:
                self.streams += 1
                spans.append((self.streams, choose.randint(0, 5), min(more, room)))
        prompt = spans_tokens(spans)
        self.told.append(list(spans))
        # The same prompt often gets the same answer: then two tables carry the same keys beyond it.
        output = 0 if choose.random() < 0.5 else self.names + 1
        answer: Span = (500_000 + output, prompt, longest - prompt)
        tokens = token_ids([*spans, answer])
        self.names += 1
        ours = KVSequence(
            id=self.names,
            session=self.names,
            turn=0,
            num_tokens=prompt,
            max_tokens=longest,
            spans=(*self.split(spans), answer),
        )
        length = min(longest, prompt + choose.choice([1, size, choose.randint(1, 6 * size)]))
        self.waiting.append(Pair(ours, self.vllm.request(self.names, tokens[:prompt]), tokens, prompt, length))

    def split(self, spans: Sequence[Span]) -> list[Span]:
        """The same tokens in other pieces, sometimes."""
        pieces: list[Span] = []
        for stream, start, length in spans:
            at = self.random.randint(1, length) if self.random.random() < 0.3 else length
            pieces += [(stream, start, at), (stream, start + at, length - at)] if at < length else [(stream, start, at)]
        return pieces

    def step(self) -> None:
        """One step as the scheduler would make it, with chunks and pauses by chance."""
        choose, scheduled = self.random, list[tuple[Pair, int]]()
        self.vllm.manager.new_step_starts()
        preempted = False
        for pair in list(self.running):
            if pair not in self.running or choose.random() < 0.1:
                continue
            left = pair.ours.num_tokens - pair.ours.num_computed_tokens
            new = min(left, choose.choice([left, choose.randint(1, 3 * self.pool.block_size)]))
            while not (granted := self.grow(pair, new)):
                victim = self.running[-1]
                scheduled = [(other, n) for other, n in scheduled if other is not victim]
                self.preempt(victim)
                preempted = True
                if victim is pair:
                    break
            if granted:
                scheduled.append((pair, new))
            elif preempted:
                break
        while self.waiting and not preempted and len(self.running) < 24:
            pair = self.waiting[0]
            budget = choose.choice([1 << 30, choose.randint(1, 5 * self.pool.block_size)])
            tokens = self.admit(pair, budget)
            if not tokens:
                if not self.running or choose.random() < 0.2:
                    self.waiting.pop(0)  # its client went away
                break
            self.waiting.pop(0)
            self.running.append(pair)
            scheduled.append((pair, tokens))
        self.ours.end_step()
        for pair, new in scheduled:
            pair.ours.num_computed_tokens += new
            pair.vllm.num_computed_tokens += new
            if pair.ours.num_computed_tokens == pair.ours.num_tokens < pair.length:
                pair.vllm.append_output_token_ids(pair.tokens[pair.ours.num_tokens])
                pair.ours.num_tokens += 1
            elif pair.ours.num_computed_tokens == pair.ours.num_tokens:
                self.finish(pair)
        for pair in list(self.running):
            if choose.random() < 0.01:
                self.finish(pair)

    def run(self, operations: int) -> Found | None:
        """The first difference in about that many operations, if there is one."""
        try:
            while self.operations < operations:
                for _ in range(self.random.choice([0, 0, 1, 1, 2])):
                    if len(self.waiting) < 12:
                        self.arrive()
                limit = min((pair.length - pair.ours.num_tokens for pair in self.running if pair.decodes), default=0)
                decoding = all(pair.decodes for pair in self.running)
                if limit and decoding and not self.pool.lookahead and self.random.random() < 0.3:
                    self.leap(limit)
                else:
                    self.step()
                if self.pool.caching and self.random.random() < 0.002:
                    self.reset()
                if self.random.random() < 0.002:
                    for pair in self.random.sample(self.running, len(self.running)):
                        self.finish(pair)
                    if self.pool.caching and self.random.random() < 0.5:
                        self.reset()
                if self.random.random() < 0.02:
                    self.ours.check()
            self.same("end", "free queue", self.queue(), self.vllm.queue())
        except Differs as differs:
            return differs.found
        except (AssertionError, LookupError, ValueError) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raised = f"{type(error).__name__}: {error}"
            return Found(self.operations, where.name, "outcome", *_raised_by(where.filename, raised), "", "")
        return None


def _raised_by(file: str, raised: str) -> tuple[str, str]:
    """(ours, vLLM's) outcome when one side raised: which one is told by the file."""
    return ("no error", raised) if "vllm" in Path(file).parts else (raised, "no error")


def main(arguments: Sequence[str] | None = None) -> int:
    """0: equal at every operation; 1: they differ; 2: vLLM's source could not be had or used."""
    parser = argparse.ArgumentParser(prog="validate_paged", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vllm", type=Path, help=f"vllm-{VERSION}.tar.gz or its unpacked folder (default: download)")
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="of all pools together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--caching", choices=("on", "off", "both"), default="both")
    parser.add_argument("--planted", choices=sorted(PLANTED), help="a mistake to make on purpose: it must be found")
    chosen = parser.parse_args(arguments)
    pools = [pool for pool in POOLS if chosen.caching in ("both", "on" if pool.caching else "off")]
    each = -(-chosen.operations // max(1, len(pools)))
    differ = 0
    met: Counter[str] = Counter()
    try:
        with tempfile.TemporaryDirectory() as folder, vllm_core(unpacked(chosen.vllm, Path(folder))) as core:
            for number, pool in enumerate(pools):
                comparison = Comparison(core, pool, chosen.seed * 1000 + number, chosen.planted)
                found = comparison.run(each)
                differ += found is not None
                met += comparison.met
                print(f"{pool}: {comparison.operations} operations, {found or 'no difference'}", flush=True)
    except (NoVllm, StubCalled) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{count} x {verb}" for verb, count in met.most_common()))
    print(f"vLLM {VERSION}'s own KVCacheManager: {differ} of {len(pools)} pools differ")
    return 1 if differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
