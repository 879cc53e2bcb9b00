"""Claims of all three write-ups on how many bytes so many tokens take: their arithmetic, and the same from runs."""

from __future__ import annotations

from claim import GIB, HERE, MIB, Found, claim, kv_bytes, simulate

from hbmtwin import kv_layout, model

LONG_7B = str(HERE / "llama-2-7b-32k.json")
"""Layers and heads of Llama-2-7B, and positions for 32,768 tokens."""
LAYERS = 32
KIB = 1 << 10


def _peak(id: str, *overrides: str) -> int:
    """The most bytes that tokens took at once in a run that served all requests."""
    result = simulate(id, *overrides)
    assert result.summary["requests_completed"] == result.summary["requests_total"]
    return max(kv_bytes(result))


@claim(
    "A2",
    "A token's KV takes 16 KiB a layer: 1,024 tokens 16 MiB, 4,096 64 MiB, 16,384 256 MiB; over 32 layers 4,096 tokens "
    "take 2 GiB.",
)
def a2() -> Found:
    """The layout's bytes of a token, and what prompts of three lengths take."""
    token_bytes = kv_layout(model("llama-2-7b")).token_bytes
    sizes = {n: _peak("A2", f"model.name={LONG_7B}", f"workload.prompt_tokens={n}") for n in (1024, 4096, 16384)}
    assert _peak("A2", "workload.prompt_tokens=4095") == 4095 * token_bytes, "the 7B itself, up to its limit"
    assert all(size == tokens * token_bytes for tokens, size in sizes.items())
    return Found(
        "holds",
        f"a layer: a token {token_bytes / LAYERS / KIB:.0f} KiB, "
        + ", ".join(f"{tokens:,} tokens {size / LAYERS / MIB:.0f} MiB" for tokens, size in sizes.items())
        + f"; 4,096 tokens over {LAYERS} layers {sizes[4096] / GIB:.0f} GiB",
        "K and V of 32 heads x 128 elements x 2 bytes, to the byte. It is what tokens take; what is held for them "
        "besides is the matter of A7, C1 and C3.",
    )


A3_TURNS = (1, 2, 20, 100)


@claim("A3", "With 10 tokens a turn a 7B chat holds 5 MiB after turn 1, 10 after 2, 100 after 20 and 500 after 100.")
def a3() -> Found:
    """What the history of one conversation keeps behind each turn, and what it keeps of all its tokens."""
    result = simulate("A3")
    line, requests = result.timeline, result.requests
    stored = [*sorted(set(line["kv_parked"]))[1:], line["kv_tokens"].max()]  # behind the last turn nothing is parked
    token_bytes = kv_layout(model("llama-2-7b")).token_bytes
    history = [int(tokens) * token_bytes for tokens in requests["prompt_tokens"] + requests["output_tokens"]]
    assert [size + token_bytes for size in stored] == history

    def told(sizes: list[int], digits: int) -> str:
        return ", ".join(f"{sizes[turn - 1] / MIB:.{digits}f}" for turn in A3_TURNS)

    return Found(
        "holds",
        f"{told(stored, 1)} MiB, and {told(history, 0)} once the last token of the answer is stored, too",
        f"{token_bytes // KIB} KiB a token. The last token of an answer is sampled, and only the next turn computes "
        "and stores it: between two turns a history is one token short of what it says.",
    )


@claim("A9", '(Its arithmetic) 4,096 prompt tokens take "2 MB a layer", 512 decoded ones "256 MB a layer".')
def a9() -> Found:
    """Behind the prompt, and at the end of the answer."""
    result = simulate("A9")
    assert result.summary["requests_completed"] == 1
    sizes = kv_bytes(result)
    token_bytes = kv_layout(model("llama-2-7b")).token_bytes
    assert token_bytes == kv_layout(model(result.scenario.model.name)).token_bytes
    prompt = 4096 * token_bytes
    assert prompt in sizes, "there is a row behind the prompt"
    answer = max(sizes) - prompt
    assert answer == 512 * token_bytes
    return Found(
        "wrong",
        f"{prompt / LAYERS / MIB:.0f} MiB a layer for the prompt, {answer / LAYERS / MIB:.0f} MiB a layer for the 512 "
        f"decoded tokens; over all {LAYERS} layers {prompt / MIB:,.0f} and {answer / MIB:.0f} MiB",
        f"By its own {token_bytes / LAYERS / KIB:.0f} KiB a token and layer. The second figure is that of all layers, "
        "and so is the first, with MB for GB.",
        f"The figures told have 512 decoded tokens take 128 times as much as a prompt of 4,096. A token takes the same "
        f"in both phases, so that they take 1/{prompt / answer:.0f} of it. Both are sums over all {LAYERS} layers, and "
        "the first lost a factor of 1,024 with its unit.",
    )


@claim(
    "B2",
    "The history is 250 tokens after turn 1 and 430 after turn 2 (50 + 200, 30 + 150), and may pass 2,000 by turn 10.",
)
def b2() -> Found:
    """Two turns as told, and a hundred conversations of ten turns, of B1's lengths."""
    result = simulate("B2")
    token_bytes = kv_layout(model("llama-2-70b"), tensor_parallel_size=4).token_bytes
    stored = [max(result.timeline[column]) // token_bytes for column in ("kv_parked", "kv_tokens")]
    history = [stored_tokens + 1 for stored_tokens in stored]
    told = result.requests["prompt_tokens"] + result.requests["output_tokens"]
    assert history == list(told)
    drawn = simulate("B1", "workload.users=100", "workload.num_prompts=1000").requests
    lengths = drawn.assign(tokens=drawn["prompt_tokens"] + drawn["output_tokens"], turn=drawn["turn"] + 1)
    passes = lengths[lengths["tokens"] > 2000].groupby("session")["turn"].min()
    assert len(passes) == 100, "every conversation does"
    ends = lengths.loc[lengths["turn"] == 10, "tokens"]
    return Found(
        "holds",
        f"{history[0]} tokens, {history[1]} tokens; of 100 conversations of B1's lengths all pass 2,000, the first in "
        f"turn {passes.min()}, half of them by turn {passes.median():.0f}, the last in turn {passes.max()}",
        f"Stored are {stored[0]} and {stored[1]}: the last token of an answer is stored with the next turn. Turns of "
        f"30-50 and 150-300 tokens make 265 on average, so that by turn 10 a history has {ends.min():,} to "
        f"{ends.max():,} tokens.",
    )


B7_HEADS = {
    "64 KV heads (MHA)": str(HERE / "llama-2-70b-mha.json"),
    "8 (GQA, the model's own)": "llama-2-70b",
    "1 (MQA)": str(HERE / "llama-2-70b-mqa.json"),
}
B7_FOUR_RANKS = ("engine.tensor_parallel_size=4", "device.memory_bytes=64GiB")


@claim("B7", "GQA and MQA shrink the cache.")
def b7() -> Found:
    """2,048 tokens with so many KV heads, whole and on each of four ranks."""
    whole, rank = (
        {words: _peak("B7", f"model.name={name}", *ranks) for words, name in B7_HEADS.items()}
        for ranks in ((), B7_FOUR_RANKS)
    )
    for name, size in zip(B7_HEADS.values(), whole.values(), strict=True):
        assert size == 2048 * kv_layout(model(name)).token_bytes
    (mha, gqa, mqa), (mha_rank, gqa_rank, mqa_rank) = whole.values(), rank.values()
    return Found(
        "holds",
        "2,048 tokens: "
        + ", ".join(f"{words} {size / MIB:,.0f} MiB" for words, size in whole.items())
        + f": {mha / gqa:g} and {mha / mqa:g} times smaller; on each of 4 ranks "
        + ", ".join(f"{size / MIB:,.0f}" for size in rank.values())
        + f" MiB: {mha_rank / gqa_rank:g} and {mha_rank / mqa_rank:g} times",
        "As many times as there are fewer KV heads. Ranks share heads out, and a single one cannot be shared: each of "
        f"4 ranks keeps all of MQA's cache, which is there {gqa_rank / mqa_rank:g} times smaller than GQA's, not "
        f"{gqa / mqa:g} times.",
    )


C2_MHA = f"model.name={HERE / 'llama-2-70b-mha.json'}"


@claim(
    "C2",
    "The 70B's KV is 2 x L x H x S x D x bytes = 5,368,709,120 bytes for L 80, H 64, S 2,048, D 128 and FP16; 20 GiB "
    "for batch 4.",
)
def c2() -> Found:
    """One sequence and four, over four ranks, with the heads that C counts and with the model's."""

    def all_ranks(*overrides: str) -> list[int]:
        return [4 * _peak("C2", f"workload.num_prompts={batch}", *overrides) for batch in (1, 4)]

    counted, real = all_ranks(C2_MHA), all_ranks()
    assert counted[0] == 2 * 80 * 64 * 2048 * 128 * 2
    return Found(
        "holds in part",
        f"{counted[0]:,} bytes, {counted[1] / GIB:g} GiB for batch 4; with the model's 8 KV heads {real[0]:,} bytes, "
        f"{real[0] / GIB:g} GiB, and {real[1] / GIB:g} GiB",
        "H are the heads of K and V. Llama-2-70B has 8 of them for its 64 query heads, so that its cache is "
        f"{counted[0] / real[0]:g} times smaller.",
        f"The formula is exact, and the model is another: with the 8 KV heads of Llama-2-70B the batch takes "
        f"{real[1] / GIB:g} GiB, of which each of 4 devices holds {real[1] / GIB / 4:g}. 64 are right for a model "
        "without grouped heads; `num_key_value_heads` in its `config.json` tells.",
    )
