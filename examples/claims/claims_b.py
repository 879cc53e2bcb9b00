"""The claims of write-up B: conversations on a 70B model over four devices."""

from __future__ import annotations

from claim import Found, claim, simulate
from padding import EQUAL_ANSWERS, paddings

from hbmtwin import kv_layout, model

B4_DTYPES = {"INT8": "int8_per_token", "INT4": "int4_per_token"}
B4_LOADS = {
    "64 users, who all fit": ("workload.users=64", "workload.num_prompts=256"),
    "256 users, who do not": (),
    "256 users with prompts of 40 tokens": ("workload.prompt_tokens=40",),
}


@claim("B4", "INT8 KV saves 50 % and INT4 75 %; throughput rises by 10 to 20 %.")
def b4() -> Found:
    """Bytes of a token with its scales, and output tokens a second of the same traffic, with memory short and not."""
    full = kv_layout(model("llama-2-70b"), tensor_parallel_size=4).token_bytes
    saved = [
        100 * (1 - kv_layout(model("llama-2-70b"), dtype=dtype, tensor_parallel_size=4).token_bytes / full)
        for dtype in B4_DTYPES.values()
    ]
    gains = []
    for words, load in B4_LOADS.items():
        before = _output_tokens_per_s(*load)
        more = [_output_tokens_per_s(f"kv_cache.dtype={dtype}", *load) / before - 1 for dtype in B4_DTYPES.values()]
        gains.append(f"{words} {' and '.join(f'{100 * gain:+.1f} %' for gain in more)}")
    return Found(
        "holds in part",
        f"INT8 saves {saved[0]:.1f} %, INT4 {saved[1]:.1f} %, scales included; throughput: {', '.join(gains)}",
        "The scale of each token takes the rest. While all users fit, only the reading of KV gets cheaper, a small "
        "part of a step; 10 to 20 % need a device that is short of memory and prompts so long that computing them "
        "takes most of the time. No time is counted for dequantising, and INT4 has no paged kernel on Ascend.",
    )


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
