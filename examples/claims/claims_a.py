"""The claims of write-up A: conversations on a 7B model."""

from __future__ import annotations

import numpy as np
import pandas as pd
from claim import GIB, MIB, Found, claim, kv_bytes, simulate
from oom_point import OomPoint, oom_point

from hbmtwin import Result, device, kv_layout, model


@claim(
    "A1",
    "A 7B chat falls from 15 to 2 token/s past 20 turns, while batch size is unchanged and memory climbs.",
    picture="Time per token and memory against the turn: concat on a caching allocator beside paged",
)
def a1() -> Found:
    """The same traffic with copies and without, with driver calls and without, says what a later token pays for."""
    concat, pooled, paged = (table.iloc[[0, -1]] for table in a1_turns().values())

    def added(column: pd.Series[float]) -> float:
        return float(column.iloc[1] - column.iloc[0])

    def fall(table: pd.DataFrame) -> str:
        rate = 1000 / table["step_ms"]
        return f"{rate.iloc[0]:.0f} to {rate.iloc[1]:.0f} token/s (x {rate.iloc[1] / rate.iloc[0]:.2f})"

    more = added(concat["step_ms"])
    reads = added(paged["step_ms"])
    driver = added(concat["step_ms"] - pooled["step_ms"])
    ms_per_gib = more / added(concat["kv_gib"])
    start_gib = concat["kv_gib"].iloc[0]
    told_ms = 1000 / 2 - 1000 / 15
    told_gib = told_ms / ms_per_gib
    capacity = device("ascend-910b2").memory_bytes / GIB
    assert told_gib > 2 * capacity
    assert reads < more / 2
    assert abs(driver) < 1
    steepest = _by_turn(simulate("A1", *_users(A1_MOST_USERS))).iloc[[0, -1]]
    ratio = steepest["step_ms"].iloc[0] / steepest["step_ms"].iloc[1]
    one_more = simulate("A1", "memory.oom=stop", *_users(A1_MOST_USERS + 1))
    assert one_more.oom is not None
    assert ratio < 2 / 15
    return Found(
        "holds in part",
        f"turn 1 to 25, 16 users all the time: concat {fall(concat)}, device {concat['hbm_gib'].iloc[0]:.0f} to "
        f"{concat['hbm_gib'].iloc[1]:.0f} GiB full, of it KV {start_gib:.1f} to {concat['kv_gib'].iloc[1]:.1f}; paged "
        f"{fall(paged)}",
        f"Of the {more:.0f} ms that a token takes longer, {reads:.0f} read the longer cache, as paged does, "
        f"and {more - reads - driver:.0f} copy it; driver calls are below 1. The ratio told, 2/15 "
        f"(x 0.133), takes as many users as the device holds: {A1_MOST_USERS}, with a token budget that leaves more to "
        f"KV, end at x {ratio:.3f} with {steepest['kv_gib'].iloc[1]:.0f} GiB of KV, and {A1_MOST_USERS + 1} run out of "
        f"memory. The rates told are {told_ms:.0f} ms a token apart, here {told_gib:.0f} GiB more KV on a device of "
        f"{capacity:.0f}: on such a device growing KV, its copies included, is not all that slowed that server.",
        "A chat does slow down turn by turn while the batch stays the same, and memory climbs. Reading a longer cache "
        "is less than half of it: the rest is copies, which code makes that concatenates at every token, and paging "
        "does not. A fall by the ratio told takes as many users as the device holds. The rates told are out of reach: "
        "a cache that costs so much more time would be over twice as large as this device's memory.",
    )


A1_MOST_USERS = 21
"""As many as live through all turns, with the token budget of :func:`_users`."""


def _users(users: int) -> tuple[str, ...]:
    """More users than A1 has, and a smaller token budget, so that activations leave 5 GiB more to their KV."""
    return (
        f"workload.users={users}",
        f"workload.num_prompts={25 * users}",
        "scheduler.max_num_batched_tokens=8192",
    )


def a1_turns() -> dict[str, pd.DataFrame]:
    """Each policy's conversation, turn by turn (from 1 on).

    ``step_ms`` is the mean time of a step in which all users decode, so a token's; ``kv_gib`` the KV that it reads;
    ``hbm_gib`` the most that the device has given away.
    """
    results = {
        "caching": simulate("A1"),
        "pooled": simulate("A1", "memory.kv_arena=pooled"),
        "paged": simulate("A1", preset="paged"),
    }
    return {name: _by_turn(result) for name, result in results.items()}


def _by_turn(result: Result) -> pd.DataFrame:
    assert result.oom is None
    assert result.steps is not None
    users = result.scenario.workload.users
    turns = result.requests.set_index("id")["turn"] + 1
    steps = result.steps[[list(new) == [1] * (users or 0) for new in result.steps["new_tokens"]]]
    repeat = steps["repeat"].to_numpy()
    read_tokens = np.array([sum(context) for context in steps["context_tokens"]]) + (repeat + 1) / 2 * (users or 0)
    token_bytes = kv_layout(model("llama-2-7b")).token_bytes
    table = pd.DataFrame(
        {
            "turn": [turns[ids[0]] for ids in steps["seq_ids"]],
            "repeat": repeat,
            "step_ms": steps["duration_ns"].to_numpy() / 1e6,
            "kv_gib": read_tokens * repeat * token_bytes / GIB,
        }
    )
    sums = table.groupby("turn").sum()
    means = sums[["step_ms", "kv_gib"]].div(sums["repeat"], axis=0)
    assert list(means.index) == list(range(1, 26)), (
        "in every turn there are steps with all users: the batch is unchanged"
    )
    line = result.timeline
    ends = result.requests.groupby("turn")["end_ns"].max().to_numpy()
    turn = np.minimum(np.searchsorted(ends, line["time_ns"].to_numpy()), len(ends) - 1) + 1
    given = line[["time_ns"]].assign(hbm=(result.summary["capacity_bytes"] - line["driver_free"]) / GIB)
    return means.assign(hbm_gib=given.groupby(turn)["hbm"].max())


@claim("A4", "Truncating at 4,096 tokens caps the cache.")
def a4() -> Found:
    """The cache of one long conversation, and what it lost."""
    result = simulate("A4")
    held = kv_bytes(result)
    lost = result.requests["dropped_tokens"]
    assert set(held[held.index(max(held)) : -1]) == {max(held)}, "flat to the end of the conversation"
    return Found(
        "holds",
        f"{max(held) / GIB:.2f} GiB from turn {int((lost > 0).idxmax()) + 1} on; "
        f"{int((lost > 0).sum())} of {len(lost)} turns lost tokens, the last one {int(lost.iloc[-1]):,}",
        "4,096 tokens x 512 KiB; the price is what the model no longer sees, which the claim does not count.",
    )


@claim("A5", "Attention sinks and a recent window (4 + 128 tokens) bound memory.")
def a5() -> Found:
    """The conversation of A4 in 132 slots."""
    result, truncated = simulate("A5"), simulate("A4")
    held = kv_bytes(result)
    lost, lost_there = (r.requests["dropped_tokens"] for r in (result, truncated))
    assert set(held[held.index(max(held)) : -1]) == {max(held)}, "flat to the end of the conversation"
    assert list(result.requests["prompt_tokens"]) == list(truncated.requests["prompt_tokens"]), "the same conversation"
    share = max(kv_bytes(truncated)) / max(held)
    return Found(
        "holds",
        f"{max(held) / MIB:.0f} MiB from turn {int((lost > 0).idxmax()) + 1} on, 1/{share:.0f} of A4; "
        f"{int((lost > 0).sum())} of {len(lost)} turns lost tokens (A4: {int((lost_there > 0).sum())}), the last one "
        f"{int(lost.iloc[-1]):,}",
        "132 tokens x 512 KiB, overwritten in place, so that nothing is copied past the window; but the model sees "
        "less than one turn of this chat: the claim is about memory, not about answers.",
    )


A8_RULES = ("exact", "doubling", "step")
A8_SEEDS = (0, 1)
"""Draws of the lengths: one decides by a few requests, and so does the bisection."""
A8_WHOLE_PROMPTS = "scheduler.max_num_batched_tokens=65536"
"""All prompts fit into one step, so that none is computed in chunks."""


@claim("A8", "Prefill takes its KV at once, decode grows it token by token; one rule for both makes decode fail.")
def a8() -> Found:
    """Each growth rule for both phases, and for decode alone, behind prompts that take exactly their length."""
    single = {rule: _points(f"kv_cache.growth={rule}") for rule in A8_RULES}
    hybrid = {rule: _points(f"kv_cache.decode_growth={rule}") for rule in A8_RULES}
    static = _points("kv_cache.growth=static")
    whole = [_held(_points(f"kv_cache.{key}=exact", A8_WHOLE_PROMPTS)) for key in ("growth", "decode_growth")]
    assert whole[0] == whole[1], "exact and hybrid with exact differ by the chunks of the prompt only"
    assert all(_held(hybrid[rule]) < _held(single[rule]) for rule in ("doubling", "step"))
    deaths = [point.in_decode for points in (*single.values(), *hybrid.values()) for point in points]
    assert all(deaths), "with hybrid as without, it is decode that fails"
    assert not any(point.in_decode for point in static)
    paged = simulate("A8", preset="paged")
    assert paged.summary["requests_completed"] == 64
    held = ", ".join(f"{rule} {_held(hybrid[rule])} (for both: {_held(single[rule])})" for rule in A8_RULES)
    return Found(
        "wrong",
        f"requests held at once, two draws together: hybrid with {held}; static for both {_held(static)}",
        "With doubling and steps the first decoded token asks for the buffer that the single rule has made by then, "
        "and for a copy on top, so decode fails with fewer requests. Exact decodes alike under both, and all the "
        "difference is that hybrid takes room for a prompt at once, where exact copies it from chunk to chunk: with a "
        f"token budget of 65,536, so without chunks and with larger activations, both hold {whole[0]}. "
        "Static alone never fails in decode, since it fails in prefill. What helps is growth without copies: "
        f"paged ends all 64 of the first draw ({paged.summary['preemptions']} preemptions).",
        "Decode fails under one rule, and under two as well: whichever rule decode has, it asks for a larger buffer "
        "beside the one that it copies. Only static buffers never grow, and they fail in prefill, with far fewer "
        "requests. It takes growth without copies, block by block.",
    )


def _points(*rule: str) -> list[OomPoint]:
    return [oom_point("A8", *rule, f"seed={seed}", most=80) for seed in A8_SEEDS]


def _held(points: list[OomPoint]) -> int:
    return sum(point.requests for point in points)
