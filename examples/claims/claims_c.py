"""The claims of write-up C: allocators, padding, and what quantising V saves."""

from __future__ import annotations

from claim import GIB, MIB, Found, claim, simulate
from empty_cache import death, operations
from padding import EQUAL_ANSWERS, paddings

from hbmtwin import Result, device

C5_SEEDS = (0, 1, 2)
C5_PERIODS = (1, 10, 100)
"""Steps between two calls of empty_cache."""
C5_CURE = 'memory.alloc_conf="expandable_segments:True"'


@claim(
    "C5",
    "The caching allocator runs out of memory although enough is free in all; empty_cache makes it worse.",
    picture="Where KV and free pieces lie when a request fails: caching, pooled with best fit, pooled with next fit",
)
def c5() -> Found:
    """The death, what would have held, and the same operations with empty_cache in between."""
    died = simulate("C5")
    assert _ends_in_small_pieces_only("C5", 16)
    sooner = later = 0
    for seed in C5_SEEDS:
        # A server that lives shows what the program would have gone on to ask for.
        held = simulate("C5", C5_CURE, "results.memory_trace=true", f"seed={seed}")
        assert held.oom is None
        assert held.memory_trace is not None
        ops, limit = operations(held.memory_trace), _cap(died)
        alone = death(ops, limit)
        assert alone.index is not None
        assert death(ops, limit, before=alone.index).index == alone.index, "the allocator had given back all it could"
        called = [death(ops, limit, steps=steps) for steps in C5_PERIODS]
        ends = [len(ops) if d.index is None else d.index for d in called]
        sooner += sum(end < alone.index for end in ends)
        later += sum(end > alone.index for end in ends)
        if seed == died.scenario.seed:
            most, first, each_step = _most_kv(held), alone, called[0]
            seconds = ops[alone.index].time_ns / 1e9
    assert later > sooner
    assert simulate("C5", preset="paged").oom is None
    extra_s = _driver_s(each_step.driver_calls, each_step.syncs) - _driver_s(first.driver_calls, first.syncs)
    return Found(
        "holds in part",
        f"{_death(died)}, though the whole traffic never holds more than {most}; empty_cache every 1, 10 or 100 steps "
        f"on three draws: OOM sooner in {sooner} of {len(C5_SEEDS) * len(C5_PERIODS)}, later in {later}",
        "Before it fails, the allocator itself gives back every segment that is wholly free, so the call never saves "
        "the request that fails; called at every step it leaves "
        f"{each_step.stranded_bytes / GIB:.1f} GiB reserved and unused instead of "
        f"{first.stranded_bytes / GIB:.1f} and costs "
        f"{each_step.driver_calls / first.driver_calls:.1f} times the driver calls, {100 * extra_s / seconds:.0f} % of "
        "the time. It takes one large buffer a sequence: of 16 requests, too, it dies, while with K and V apart per "
        "layer all 16 end; and with expandable_segments all 60 do, on each draw.",
        "The death is real. It takes a caching allocator, one large buffer a sequence, and growth by a new, larger "
        "buffer. `empty_cache` is neither its cause nor its cure: before the allocator says that memory is out it has "
        "given back whatever is wholly free. Called every so often it moves the death, more often to later than to "
        "sooner, and costs driver calls. What would have held: `expandable_segments:True`, buffers per layer, or "
        "pages.",
    )


def _ends_in_small_pieces_only(id: str, requests: int) -> bool:
    """Whether so few requests are served with K and V apart per layer, and not with one buffer a sequence."""
    few = f"workload.num_prompts={requests}"
    return simulate(id, few).oom is not None and simulate(id, few, "kv_cache.tensors=per_layer").oom is None


def _cap(died: Result) -> int:
    """What the allocator of that run could reserve at most."""
    assert died.oom is not None
    return int(died.oom["limit_bytes"] - died.oom["static_bytes"])


def _driver_s(driver_calls: int, syncs: int) -> float:
    spec = device("ascend-910b4")
    return float(driver_calls * spec.driver_call_ns + syncs * spec.sync_ns) / 1e9


def _death(result: Result) -> str:
    """The death by fragmentation in a few words."""
    oom = result.oom
    assert oom is not None
    assert oom["cause"] == "external_fragmentation"
    need, free, largest = (oom[f"{name}_bytes"] / MIB for name in ("need", "free", "largest_free"))
    return f"dies at {oom['time_s']:.1f} s: {need:,.0f} MiB asked, {free:,.0f} free, largest piece {largest:,.0f}"


def _most_kv(result: Result) -> str:
    return f"{result.timeline['kv_tokens'].max() / GIB:.2f} of {result.summary['kv_budget_bytes'] / GIB:.2f} GiB"


C6_FITS = ("best", "first", "next", "worst")
C6_SEEDS = (0, 1, 2)


@claim("C6", "One pool allocated up front, with a linked free list, never failed from fragmentation again.")
def c6() -> Found:
    """Each fit on the traffic of C5, and the one that holds with one user more."""
    seeds = [f"seed={seed}" for seed in C6_SEEDS]
    caching = [_died_at(simulate("C5", seed)) for seed in seeds]
    pools = {fit: [_died_at(simulate("C6", f"memory.fit={fit}", seed)) for seed in seeds] for fit in C6_FITS}
    nine = simulate("C6", "memory.fit=next", "workload.users=9")
    assert [fit for fit, ends in pools.items() if ends == [None] * len(seeds)] == ["next"]
    assert _ends_in_small_pieces_only("C6", 12)
    return Found(
        "wrong",
        f"seconds to death by fragmentation, three draws of C5's traffic: caching {_times(caching)}; pooled with "
        + "; ".join(f"{fit} fit {_times(ends)}" for fit, ends in pools.items())
        + f". With nine users next fit, too, {_death(nine)}, with {_most_kv(nine)} held",
        "A pool has no segments, whose ends keep free neighbours apart, so most draws live longer; but a buffer that "
        "grows by concatenation asks each time for a piece larger than the one it leaves. Pieces 1/64 as large (K and "
        "V per layer) let 12 requests end of which it dies otherwise, and pages of one size cannot fragment.",
        "On the traffic of C5 a pool dies of fragmentation, too: "
        + ", ".join(
            f"by {fit} fit on {_deaths(ends)} of {len(seeds)} draws" for fit, ends in pools.items() if fit != "next"
        )
        + "; next fit holds until a ninth user comes. A free list fails seldom where pieces are small beside the pool, "
        "and never where all are of one size.",
    )


def _died_at(result: Result) -> float | None:
    if result.oom is None:
        assert result.summary["requests_completed"] == result.summary["requests_total"]
        return None
    assert result.oom["cause"] == "external_fragmentation"
    return float(result.oom["time_s"])


def _deaths(ends: list[float | None]) -> int:
    return sum(end is not None for end in ends)


def _times(ends: list[float | None]) -> str:
    return ", ".join("never" if end is None else f"{end:.0f}" for end in ends)


@claim("C7", "Padding every sequence to the batch's longest wastes memory; bucketing fixes it.")
def c7() -> Found:
    """Bytes of KV that are padding, under each way to form batches."""
    wasted, equal = paddings("C7"), paddings("C7", EQUAL_ANSWERS)
    left = [100 * p["buckets of 256"].byte_share for p in (wasted, equal)]
    return Found(
        "holds in part",
        "padding among the bytes of KV, and KV at its peak: "
        + "; ".join(f"{words} {100 * p.byte_share:.0f} %, {p.peak_bytes / GIB:.2f} GiB" for words, p in wasted.items()),
        f"Buckets by prompt still leave {left[0]:.0f} %, since short answers are padded to the longest; {left[1]:.0f} "
        "% if all answers had 200 tokens. What fixes it is variable length.",
        "Buckets bring prompts of a length together, and leave what is padded behind short answers, whose length "
        "nobody knows; where all answers are equally long, it is what prompts of one bucket differ by. Variable length "
        "has no padding.",
    )


@claim("C10", "Quantising only V saves 30 %.")
def c10() -> Found:
    """The peak of one request's KV with V stored in fewer bits."""
    full = _peak_kv()
    saved = {
        dtype: 100 * (1 - _peak_kv(f"kv_cache.v_dtype={dtype}") / full)
        for dtype in ("int8", "int4", "int8_per_token", "int4_per_token")
    }
    return Found(
        "wrong",
        f"{saved['int8']:.1f} % at INT8, {saved['int4']:.1f} % at INT4; with a scale a token "
        f"{saved['int8_per_token']:.1f} and {saved['int4_per_token']:.1f} %",
        "V is half of the cache: a half of it is 25 %, three quarters 37.5 %; 30 % would take 6.4 bits an element.",
        "V is half of the cache: INT8 saves a half of that half, INT4 three quarters of it, less the scales. No width "
        "in use gives 30 %.",
    )


def _peak_kv(*overrides: str) -> int:
    return int(simulate("C10", *overrides).timeline["kv_tokens"].max())


C12_STATIC = ("kv_cache.growth=static", "engine.max_model_len=1536", "scheduler.max_num_seqs=6")
"""A buffer is taken once, for the longest request; six fit."""


@claim("C12", 'A pool manager of its own, an offset that only rises, "solves 90 %".')
def c12() -> Found:
    """Time to OOM and requests served, beside a pool that takes back what is freed, with growth and without."""
    bump, pooled, next_fit = simulate("C12"), simulate("C6"), simulate("C6", "memory.fit=next")
    bump_static, pooled_static = simulate("C12", *C12_STATIC), simulate("C6", *C12_STATIC)
    total = bump.summary["requests_total"]
    assert total == _served(next_fit) == _served(pooled_static)
    return Found(
        "wrong",
        f"dies at {_seconds(bump)} with {_served(bump)} of {total} requests served; pooled with best fit at "
        f"{_seconds(pooled)} with {_served(pooled)}, with next fit it serves all {total}. With buffers taken once, at "
        f"full length, it dies at {_seconds(bump_static)} with {_served(bump_static)}, and pooled serves all {total}",
        "Nothing is reclaimed, so the pool is used up once its size has been asked for, by concatenation within "
        f"{bump.requests['output_tokens'].max()} tokens. It holds for a server that ends, or sets the offset back, "
        "before as many requests came as the pool has buffers.",
        "An offset that only rises gives every byte away once, and serves as many requests as there is room for "
        "buffers. It holds for a process that ends, or sets the offset back, before that.",
    )


def _seconds(result: Result) -> str:
    assert result.oom is not None
    return f"{result.oom['time_s']:.1f} s"


def _served(result: Result) -> int:
    return int(result.summary["requests_completed"])
