"""The claims of write-up B: conversations on a 70B model over four devices."""

from __future__ import annotations

from functools import cache

from b1_turns import alone, machine, measured, most_users, together, users_for
from claim import Found, claim, simulate
from padding import EQUAL_ANSWERS, paddings

from hbmtwin import kv_layout, model

B4_ALL_FIT = ("workload.users=64", "workload.num_prompts=256")
B4_LONG_ANSWERS = (
    "workload.users=512",
    "scheduler.max_num_seqs=512",
    "workload.num_prompts=1024",
    "workload.prompt_tokens=256",
    "workload.output_tokens=1000",
)
B4_RESERVED = (
    "kv_cache.policy=contiguous",
    "kv_cache.growth=static",
    "kv_cache.tensors=merged",
    "memory.kv_arena=pooled",
    "memory.admission=reserve",
    "memory.oom=stop",
)
"""Each sequence gets its full length at once: a layout that INT4 has a kernel for."""


@claim(
    "B1",
    "70B on 64 GB devices, TP 4, limit 4,096, turns of 30-50 in and 150-300 out: turn 10 costs 210 ms a token with "
    "standard attention and 55 ms with FlashAttention; turn 1 hardly differs.",
    picture="Time per token against the turn, simulated for many users and for one, and attention of one layer as "
    "measured on a CPU",
)
def b1() -> Found:
    """A single user by simulation, more of them by the step that they decode together, and one layer on a CPU."""
    standard, flash = (alone(kind) for kind in ("standard", "flash"))
    users, most = users_for(210 / 55), most_users()
    assert users is not None
    full, lean = (together(kind, users) for kind in ("standard", "flash"))
    cpu = measured()
    ratios = [a / b for a, b in zip(cpu["standard"], cpu["flash"], strict=True)]
    return Found(
        "holds in part",
        f"turn 1 and turn 10, ms a token, standard and flash: 1 user {standard.iloc[0]:.1f} and {flash.iloc[0]:.1f}, "
        f"{standard.iloc[-1]:.1f} and {flash.iloc[-1]:.1f}; {users} users, all in the same turn, {full[0]:.0f} and "
        f"{lean[0]:.0f}, {full[-1]:.0f} and {lean[-1]:.0f}; one layer's attention on a CPU, measured, us: "
        f"{cpu['standard'][0]:.0f} and {cpu['flash'][0]:.0f}, {cpu['standard'][-1]:,.0f} and {cpu['flash'][-1]:.0f}",
        "For a single user reading the weights takes most of 42 ms, whichever attention, so that turn 10 costs "
        f"{100 * (standard.iloc[-1] / flash.iloc[-1] - 1):.0f} % more, not 3.8 times as much; that ratio takes {users} "
        f"users of the {most} who fit, and both times then are near those told. Nearly all of it is that K and V are "
        "written out for each query head, 8 for one here, and read again: an assumption of the cost model, not "
        f"measured on an NPU. The CPU's standard attention ({machine().partition(',')[0]}) makes no such copies, and "
        f"takes {ratios[0]:.1f} times as long as flash in turn 1 and {ratios[-1]:.1f} times in turn 10.",
        f"The two times and their ratio are those of a server that is nearly full: {users} users in turn 10, of {most} "
        "who fit. Alone, a token waits for the weights, and attention is a matter of "
        f"{standard.iloc[-1] - flash.iloc[0]:.0f} milliseconds. What separates the two is an assumption: that code "
        "without a fused kernel writes K and V out for each of the eight query heads that share them, and reads them "
        "again. Standard attention measured on a CPU, which does not, is slower by much the same factor in every turn, "
        f"{min(ratios):.1f} to {max(ratios):.1f}. With "
        '`attention = "standard"` in `[engine]` the cost model and the memory model assume the former; to know your '
        "own, "
        "time it: `hbmtwin bench kernels`.",
    )


@claim("B4", "INT8 KV saves 50 % and INT4 75 %; throughput rises by 10 to 20 %.")
def b4() -> Found:
    """Bytes of a token and its scales, and output tokens a second of the same traffic, with memory short and not."""
    bytes_of = {
        dtype: kv_layout(model("llama-2-70b"), dtype=dtype, tensor_parallel_size=4).token_bytes
        for dtype in ("auto", "int8", "int4", "int8_per_token", "int4_per_token")
    }
    saved = {dtype: f"{100 * (1 - size / bytes_of['auto']):.1f} %" for dtype, size in bytes_of.items()}
    all_fit, short, long = (_gain("int8_per_token", *load) for load in (B4_ALL_FIT, (), B4_LONG_ANSWERS))
    reserved8, reserved4 = (_gain(dtype, *B4_RESERVED) for dtype in ("int8_per_token", "int4_per_token"))
    assert all_fit < 10 < 20 < long
    return Found(
        "holds in part",
        f"with scales per channel INT8 saves {saved['int8']}, INT4 {saved['int4']}, with a scale a token "
        f"{saved['int8_per_token']} and {saved['int4_per_token']}; throughput with INT8, a scale a token, paged: "
        f"+{all_fit:.0f} % with 64 users, who all fit, +{short:.0f} % with 256, who do not, +{long:.0f} % with 512 and "
        f"answers of 1,000 tokens; with full length reserved, 256 users, +{reserved8:.0f} % (INT4: +{reserved4:.0f} %)",
        "Scales per channel do not grow with the tokens, so the bytes are as claimed; a scale a token takes "
        "the difference. While all users fit, only the reading of KV gets cheaper, a small "
        "part of a step. Where memory is short more sequences run at once, which gains little while prompts take most "
        "of the time and much where answers do: 10 to 20 % is one traffic's number. No time is counted for "
        "dequantising.",
        "The bytes are right with scales per channel, and less the scales with one a token. The throughput is one "
        "traffic's number: there is little to gain while all users fit, and more than 20 % where memory is short and "
        "answers are long. Try your own with `--set kv_cache.dtype=int8_per_token`.",
    )


def _gain(dtype: str, *overrides: str) -> float:
    """How much more output tokens a second, in percent, than with 16 bits."""
    return 100 * (_output_tokens_per_s(f"kv_cache.dtype={dtype}", *overrides) / _output_tokens_per_s(*overrides) - 1)


@cache
def _output_tokens_per_s(*overrides: str) -> float:
    summary = simulate("B4", *overrides).summary
    assert summary["requests_completed"] == summary["requests_total"]
    return float(summary["simulated_output_tokens"] / summary["makespan_s"])


@claim("B5", "Batching requests of similar length wastes less padding.")
def b5() -> Found:
    """Computed tokens that are padding, under each way to form batches, with answers of all lengths and of one."""
    wasted, equal = paddings("B5"), paddings("B5", EQUAL_ANSWERS)
    rest = [100 * p["sorted by prompt"].compute_share for p in (wasted, equal)]
    return Found(
        "holds",
        "padding among the computed tokens: "
        + ", ".join(f"{words} {100 * p.compute_share:.0f} %" for words, p in wasted.items()),
        "Only prompts can be sorted: a batch still waits for its longest answer, whose length nobody knows. Were all "
        f"answers of 200 tokens, sorting would leave {rest[1]:.0f} % instead of {rest[0]:.0f} %; kernels for sequences "
        "of any length need no padding at all.",
    )
