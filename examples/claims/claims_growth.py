"""Claims of write-ups B and C on how a contiguous cache grows, and on what it forgets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from claim import GIB, HERE, MIB, Found, claim, kv_bytes, simulate
from oom_point import copies, oom_point

from hbmtwin import kv_layout, model
from hbmtwin.allocators.retention import retention_rule
from hbmtwin.workloads.formats.traces import trace_lengths

TRACES = HERE / "../../../shared/traces"
"""Recorded traffic, where it lies beside the repository."""


@claim("B6", "Forgetting: past 4,096 tokens the oldest 1,024 go.")
def b6() -> Found:
    """The saw-tooth of one conversation, and what becomes of the memory under it."""
    result, doubling = simulate("B6"), simulate("B6", "kv_cache.growth=doubling")
    token_bytes = kv_layout(model("llama-2-70b"), tensor_parallel_size=4).token_bytes
    tokens = [size // token_bytes for size in kv_bytes(result)[:-1]]  # the last row stands behind the end
    full = tokens.index(4096)
    teeth = sum(1 for before, after in pairwise(tokens) if after < before)
    line = doubling.timeline
    held = (line["kv_tokens"] + line["kv_parked"] + line["kv_unfilled"]).iloc[-2]
    lost = result.requests["dropped_tokens"]
    assert held == 4096 * token_bytes
    return Found(
        "holds",
        f"once at {tokens[full]:,} tokens, between {min(tokens[full:]):,} and {max(tokens[full:]):,} at the end of "
        f"every step; {teeth} teeth in {len(lost)} turns, {int(lost.iloc[-1]):,} tokens lost",
        "The step that computes token 4,097 forgets first, hence 3,073. The 3,072 that stay are moved at each tooth, "
        f"and only concat gives memory back: a buffer that doubled stays at 4,096 tokens, {held / MIB:.0f} MiB.",
    )


@claim("C3", "Memory for max_length, taken up front, is mostly waste with conversations of a few hundred tokens.")
def c3() -> Found:
    """Utilisation, tokens' bytes over bytes held, under each rule on the same traffic."""
    results = {
        "static": simulate("C3"),
        "doubling": simulate("C3", "kv_cache.growth=doubling"),
        "step of 256": simulate("C3", "kv_cache.growth=step"),
        "exact": simulate("C3", "kv_cache.growth=exact"),
        "paged, blocks of 128": simulate("C3", preset="paged"),
        "paged, blocks of 16": simulate("C3", "kv_cache.block_size=16", preset="paged"),
    }
    assert all(result.summary["requests_completed"] == 128 for result in results.values())
    used = {name: 100 * result.summary["kv_utilization_mean"] for name, result in results.items()}
    requests = results["static"].requests
    length = (requests["prompt_tokens"] + requests["output_tokens"]).mean()
    others = ", ".join(f"{name} {percent:.0f} %" for name, percent in used.items() if name != "static")
    others_least = min(percent for name, percent in used.items() if name != "static")
    return Found(
        "holds",
        f"{100 - used['static']:.0f} % of the bytes held for KV hold no token; in use: static {used['static']:.0f} %, "
        f"{others}",
        f"Conversations end at {length:.0f} of 2,048 tokens on average, and the rest of each buffer is never filled; "
        f"every other rule uses at least {others_least / used['static']:.0f} times as much of what it holds.",
    )


C4_RULES = {
    "2x from 64": (),
    "concat": ("kv_cache.growth=exact",),
    "steps of 256": ("kv_cache.growth=step",),
    "steps of 64": ("kv_cache.growth=step", "kv_cache.step_tokens=64"),
    "static": ("kv_cache.growth=static",),
}
C4_VARIANTS = {
    "2x from 16": ("kv_cache.initial_tokens=16",),
    "2x from 256": ("kv_cache.initial_tokens=256",),
    "4x from 64": ("kv_cache.growth_factor=4",),
}


@claim(
    "C4",
    "Growing by 2x from 64 tokens is a good default.",
    picture="What concat, doubling and steps of 64 hold for the same twelve requests over time",
)
def c4() -> Found:
    """Copies, bytes copied and peak of the same twelve requests, and the OOM point, under each rule."""
    results = {name: simulate("C4", *rule) for name, rule in C4_RULES.items()}
    assert all(result.summary["requests_completed"] == 12 for result in results.values())
    made = {name: copies(result) for name, result in results.items()}
    held = {name: oom_point("C4", *rule, most=128).requests for name, rule in (C4_RULES | C4_VARIANTS).items()}
    seconds = {name: result.summary["makespan_s"] for name, result in results.items()}
    slower = {name: 100 * (time / seconds["static"] - 1) for name, time in seconds.items()}
    step_gain = 100 * (held["steps of 64"] / held["2x from 64"] - 1)
    return Found(
        "holds in part",
        "requests held at once, and of 12 requests copies, GiB copied, peak GiB: "
        + "; ".join(
            f"{name} {held[name]}, {c.count:,}, {c.copied_bytes / GIB:.1f}, {c.peak_bytes / GIB:.2f}"
            for name, c in made.items()
        ),
        f"Good beside static and concat (whose copies make the run {slower['concat']:.0f} % longer), but steps of 64 "
        f"copy 1/64 of concat's bytes however long the conversation, cost {slower['steps of 64']:.1f} % of time and "
        f"hold {step_gain:.0f} % more than 2x, whose old and new buffer together are three times the tokens. The 2 "
        f"matters (4x holds {held['4x from 64']}), the 64 hardly (from 16: {held['2x from 16']}, from 256: "
        f"{held['2x from 256']}).",
        "Doubling is better than static buffers, and than a copy at every token. But steps of 64 tokens hold more "
        "requests for a few copies more: a buffer that doubles needs three times its tokens while it is copied.",
    )


@claim("C11", "A sliding window of 2,048 tokens, in a ring buffer, is enough for most conversations.")
def c11() -> Found:
    """The flat line of one long conversation, and who loses tokens: simulated, and counted in recorded lengths."""
    line = kv_bytes(simulate("C11", *A4_CONVERSATION))
    full = line.index(max(line))
    assert set(line[full:-1]) == {2048 * 512 << 10}, "flat to the end of the conversation"
    requests = simulate("C11").requests
    losers = requests["dropped_tokens"] > 0
    conversations = losers.groupby(requests["session"]).any()
    assert int(losers.sum()) == _losers(zip(requests["prompt_tokens"], requests["output_tokens"], strict=True))
    assert losers.mean() < 0.5, "most keep all"
    shares = {BUILT_IN: 100 * losers.mean()}
    for name, file in RECORDED:
        if (TRACES / file).exists():
            lengths = list(trace_lengths(TRACES / file))
            shares[name] = 100 * _losers(lengths) / len(lengths)
    told = [f"{name} {share:.0f} %" for name, share in shares.items()]
    told[0] += f" ({100 * conversations.mean():.0f} % of its conversations)"
    others = [f"{share:.0f} % of {name}" for name, share in shares.items() if name != PAPERS]
    if len(shares) == 1:
        told.append("recorded traces are not beside the repository")
    most = [name for name, share in shares.items() if name != PAPERS and share < 50]
    few = [name for name, share in shares.items() if name != PAPERS and share >= 50]
    return Found(
        "holds in part",
        f"{max(line) / GIB:.2f} GiB a sequence at most, flat; share of requests that lose tokens: {', '.join(told)}",
        "Memory is flat by construction; whether 2,048 is enough is a question to the traffic: most requests keep all "
        f"of their tokens in {_and(most)}{f', not in {_and(few)}' if few else ''}. Requests to summarise papers are no "
        "conversations and do not count here: they show what the window does to documents.",
        f"A ring is flat by construction. Who loses tokens depends on the traffic: {_and(others)}. The smallest "
        "condition: prompt and answer, less the last token, which is sampled but never stored, fit into 2,048.",
    )


def _and(words: list[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


A4_CONVERSATION = (
    "workload.users=1",
    "workload.num_prompts=40",
    "workload.prompt_tokens=40",
    "workload.output_tokens=120",
    "workload.system_prompt_tokens=0",
    "session.turns=40",
    "session.think_time_s=1.0",
    "session.between_turns=keep",
)


def _losers(lengths: Iterable[tuple[int, int]]) -> int:
    """How many of these (prompt, output) lose tokens to C11's window. The last token sampled is never computed."""
    window = retention_rule("sliding_window(2048)")
    computed = (prompt + output - 1 for prompt, output in lengths)
    return sum(1 for tokens in computed if window.kept(tokens) < tokens)


BUILT_IN = "the built-in traffic"
PAPERS = "arXiv papers to summarise (no conversations)"
RECORDED = (
    ("Azure's chat requests of 2023", "azure2023_conv.csv.gz"),
    ("Mooncake's chat requests", "mooncake_fast25_conversation.jsonl.gz"),
    (PAPERS, "vidur_arxiv_summarization_lengths.csv.gz"),
)
"""Name and file."""
