"""Why an engine did not start, from the error that it ends with.

::

    free < utilisation x total        somebody else holds the rest              before anything is loaded
    available <= 0                    weights and the profile take all          after the profile
    need of one request > available   max_model_len is too long for what is left
    states < max_num_seqs             hybrid models: a state block a sequence
    sampler's warm-up                 logits of max_num_seqs rows have no room outside the plan
    the rest                          settings that contradict each other: no shortage of memory

What is short here is the plan, so more for KV is the cure. A device that runs out while it serves wants the opposite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hbmtwin.allocators.oom import OomFacts, classify
from hbmtwin.sim.explain import engine_start_words as words
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.judge import Judgement
from hbmtwin.sim.explain.plan import EXPANDABLE, enough, plan, pool_facts, short_of
from hbmtwin.sim.explain.printed import Printed
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.fit.options import SAFE_UTILIZATION
from hbmtwin.sim.phrases import Count, Said, Size


def too_long(finding: Finding, server: Server) -> Judgement:
    """One request of ``max_model_len`` against the bytes for KV."""
    numbers = finding.numbers
    length = int(numbers["max_model_len"])
    need, have = numbers.get("need_bytes"), numbers.get("available_kv_bytes")
    if not isinstance(need, Printed) or not isinstance(have, Printed):
        said = Said.of(words.CUT_SHORT, length=Count(length))
        return _start(finding, pool_facts(1, 0), said, [], [Said.of(words.CUT_SHORT_HELPS)], [])
    facts = pool_facts(max(need, have + 1), have)
    short = short_of(need, have)
    helps, not_enough = enough(server, short, ranks=False)
    if longest := int(numbers.get("longest", 0)):
        helps.insert(0, Said.of(words.SHORTER, length=Count(longest)))
    elif have > 0:
        about = Count(length * have // need)
        helps.insert(0, Said.of(words.SHORTER_ABOUT, length=about, have=Size(have), need=Size(need), old=Count(length)))
    half = need // 2
    if server.engine == "vllm-ascend":
        not_enough.insert(0, Said.of(words.FP8_KV_ASCEND))
    elif not server.words.get("kv_cache_dtype", "").startswith(("fp8", "int", "nvfp4")):
        fits = half <= have
        (helps if fits else not_enough).append(
            Said.of(words.FP8_KV if fits else words.FP8_KV_NOT, half=Size(half), have=Size(have))
        )
    ranks = 2 * int(server.numbers.get("tensor_parallel_size", 1))
    if half <= have + (server.size("weights_bytes") or 0) // 2:
        helps.append(Said.of(words.MORE_RANKS, new=ranks, half=Size(half)))
    not_enough.insert(0, Said.of(words.FEWER_SEQS_NOT))
    arithmetic = [
        Said.of(words.NEED_LESS_HAVE, need=Size(need), have=Size(have), short=short.said),
        Said.of(words.TOKEN, need=Size(need), length=Count(length), token=Count(round(need / length))),
        *plan(server),
    ]
    said = Said.of(words.TOO_LONG, length=Count(length), need=Size(need), have=Size(have))
    return _start(finding, facts, said, arithmetic, helps, not_enough)


def too_long_in_tokens(finding: Finding, server: Server) -> Judgement:
    """The same, as engines before 0.9 say it: in tokens."""
    length = int(finding.numbers["max_model_len"])
    tokens = int(finding.numbers.get("kv_tokens", 0))
    said = Said.of(words.TOO_LONG_TOKENS, length=Count(length), tokens=Count(tokens))
    have = server.size("available_kv_bytes")
    arithmetic = [Said.of(words.TOKENS_SHORT, length=Count(length), tokens=Count(tokens), short=Count(length - tokens))]
    helps = [Said.of(words.SHORTER_TOKENS, length=Count(tokens))] if tokens > 0 else []
    not_enough = [Said.of(words.FEWER_SEQS_NOT)]
    if have and tokens > 0:
        need = have * length // tokens
        more, less = enough(server, short_of(need, have))
        helps += more
        not_enough += less
        arithmetic.append(Said.of(words.NEED_LESS_HAVE, need=Size(need), have=Size(have), short=Size(need - have)))
        facts = pool_facts(max(need, have + 1), have)
    else:
        if tokens > 0:
            ratio = f"{length / tokens:.2f}"
            helps.append(Said.of(words.MORE_TOKENS, length=Count(length), tokens=Count(tokens), ratio=ratio))
        if server.engine == "vllm-ascend":
            not_enough.append(Said.of(words.FP8_KV_ASCEND))
        elif 0 < length <= 2 * tokens and not server.words.get("kv_cache_dtype", "").startswith("fp8"):
            helps.append(Said.of(words.FP8_TOKENS, tokens=Count(2 * tokens)))
        helps.append(Said.of(words.TAKE_LESS))
        not_enough.append(Said.of(EXPANDABLE))
        facts = pool_facts(length, tokens)  # both in tokens: only their order matters
    return _start(finding, facts, said, [*arithmetic, *plan(server)], helps, not_enough)


def nothing_left(finding: Finding, server: Server) -> Judgement:
    """Nothing for KV after the profile."""
    have = server.size("available_kv_bytes")
    over = -have if have is not None and have < 0 else None
    short = short_of(over or 1, 0)
    helps, not_enough = enough(server, short) if over else _unknown_shortage()
    if over:
        not_enough.insert(0, Said.of(words.LENGTH_NOT_YET))
    said = Said.of(words.OVERDRAWN, over=Size(over)) if over else Said.of(words.NOTHING_LEFT)
    return _start(finding, pool_facts(1, 0), said, plan(server), helps, not_enough)


def not_free(finding: Finding, server: Server) -> Judgement:
    """Less is free than the engine wants to use."""
    numbers = finding.numbers
    free, total = int(numbers.get("free_bytes", 0)), int(numbers.get("total_bytes", 0))
    usable = int(numbers.get("usable_bytes", 0))
    if "free_bytes" not in numbers or not total or not usable:
        return _start(finding, pool_facts(1, 0), Said.of(words.NOTHING_LEFT), [], [Said.of(words.SHARES_ADD)], [])
    held = Size(total - free)
    facts = replace(
        pool_facts(usable, 0),
        allocator="start-up check",
        tag=None,
        capacity_bytes=total,
        limit_bytes=total,
        largest_free_bytes=free,
        cached_free_bytes=0,
        driver_free_bytes=free,
        tenants_bytes=total - free,
        fixed_pool=False,
    )
    share = free * 100 // total / 100
    helps = [
        Said.of(words.OTHERS_AWAY, held=held, usable=Size(usable)),
        Said.of(
            words.SHARE_THE_REST,
            new=f"{share:g}",
            free=Size(free),
            total=Size(total),
            less=Size(usable - round(share * total)),
        ),
        Said.of(words.SHARES_ADD),
    ]
    arithmetic = [
        Said.of(words.FREE_BOOKS, total=Size(total), free=Size(free), held=held),
        Said.of(words.SHORT_BY, usable=Size(usable), free=Size(free), short=Size(usable - free)),
    ]
    said = Said.of(
        words.NOT_FREE,
        usable=Size(usable),
        utilization=f"{numbers.get('gpu_memory_utilization', usable / total):g}",
        total=Size(total),
        free=Size(free),
        held=held,
    )
    return _start(finding, facts, said, arithmetic, helps, [Said.of(words.LENGTH_NOT)])


def released(finding: Finding, server: Server) -> Judgement:
    """The measurement was disturbed."""
    before, after = int(finding.numbers["free_bytes"]), int(finding.numbers.get("after_bytes", 0))
    said = Said.of(words.RELEASED, before=Size(before), after=Size(after))
    return _rule(finding, said, [Said.of(words.AGAIN_ALONE), Said.of(words.FIXED_KV)], [Said.of(words.LENGTH_NOT)])


def too_few_states(finding: Finding, server: Server) -> Judgement:
    """A hybrid model with more sequences than state blocks."""
    seqs, blocks = int(finding.numbers["max_num_seqs"]), int(finding.numbers.get("num_gpu_blocks", 0))
    have = server.size("available_kv_bytes")
    block = have // blocks if have and blocks else 1  # without bytes only the order of the two counts
    said = Said.of(words.STATES, seqs=Count(seqs), blocks=Count(blocks))
    helps = [Said.of(words.FEWER_SEQS, seqs=Count(blocks))] if blocks else []
    if blocks:
        helps.append(
            Said.of(words.MORE_BLOCKS, seqs=Count(seqs), blocks=Count(blocks), ratio=f"{seqs / blocks:.2f}"),
        )
    short = Said.of(words.STATES_SHORT, seqs=Count(seqs), blocks=Count(blocks), short=Count(seqs - blocks))
    arithmetic = [short, *plan(server)]
    return _start(finding, pool_facts(seqs * block, blocks * block), said, arithmetic, helps, [])


def sampler(finding: Finding, server: Server) -> Judgement:
    """Logits without room, after the plan."""
    seqs = Count(int(finding.numbers["max_num_seqs"]))
    total = server.size("total_bytes")
    lower = (
        Said.of(words.LOWER_UTILIZATION, step=Size(total // 100)) if total else Said.of(words.LOWER_UTILIZATION_BARE)
    )
    helps = [Said.of(words.FEWER_SEQS_SAMPLER, seqs=seqs), lower]
    return _rule(
        finding,
        Said.of(words.SAMPLER, seqs=seqs),
        helps,
        [Said.of(words.HIGHER_NOT), Said.of(words.LENGTH_NOT_SAMPLER)],
    )


def batch_below_length(finding: Finding, server: Server) -> Judgement:
    """Prompts that may not be cut."""
    batch = Count(int(finding.numbers["max_num_batched_tokens"]))
    length = Count(int(finding.numbers.get("max_model_len", 0)))
    helps = [Said.of(words.CHUNKED), Said.of(words.BATCH_UP, length=length), Said.of(words.LENGTH_DOWN, length=batch)]
    return _rule(
        finding, Said.of(words.BATCH_BELOW_LENGTH, batch=batch, length=length), helps, [Said.of(words.MEMORY_NOT)]
    )


def batch_below_seqs(finding: Finding, server: Server) -> Judgement:
    """A batch with more sequences than tokens."""
    batch = Count(int(finding.numbers["max_num_batched_tokens"]))
    seqs = Count(int(finding.numbers.get("max_num_seqs", 0)))
    said = Said.of(words.BATCH_BELOW_SEQS, batch=batch, seqs=seqs)
    return _rule(finding, said, [Said.of(words.SEQS_DOWN, seqs=batch)], [Said.of(words.MEMORY_NOT)])


def above_positions(finding: Finding, server: Server) -> Judgement:
    """A length that the model was not made for."""
    length = Count(int(finding.numbers["max_model_len"]))
    positions = Count(int(finding.numbers.get("positions", 0)))
    said = Said.of(words.POSITIONS, length=length, positions=positions)
    return _rule(finding, said, [Said.of(words.LENGTH_DOWN, length=positions)], [Said.of(words.MEMORY_NOT)])


def _start(
    finding: Finding,
    facts: OomFacts,
    said: Said,
    arithmetic: Sequence[Said],
    helps: Sequence[Said],
    does_not_help: Sequence[Said],
) -> Judgement:
    """A shortage of the plan, of which ``classify`` names the cause."""
    return Judgement(
        classify(facts),
        "start_up",
        finding.rank,
        said,
        tuple(arithmetic),
        tuple(helps),
        tuple(does_not_help),
        facts,
        finding.line,
        "kv_cache",
    )


def _rule(finding: Finding, said: Said, helps: Sequence[Said], does_not_help: Sequence[Said]) -> Judgement:
    """No shortage that the text tells the figures of."""
    return Judgement(
        None, "start_up", finding.rank, said, (), tuple(helps), tuple(does_not_help), pool_facts(0, 0), finding.line
    )


def _unknown_shortage() -> tuple[list[Said], list[Said]]:
    """What changes a plan whose figures the text does not tell."""
    helps = [
        Said.of(words.LARGER_SHARE, safe=SAFE_UTILIZATION),
        Said.of(words.SMALLER_BATCH),
        Said.of(words.TAKE_LESS),
    ]
    return helps, [Said.of(words.LENGTH_NOT_YET), Said.of(EXPANDABLE)]


START: dict[str, Callable[[Finding, Server], Judgement]] = {
    "error_length_bytes": too_long,
    "error_length_tokens": too_long_in_tokens,
    "error_no_kv": nothing_left,
    "error_no_length": nothing_left,
    "error_free_too_little": not_free,
    "error_released": released,
    "error_states": too_few_states,
    "error_sampler": sampler,
    "error_batch_below_length": batch_below_length,
    "error_batch_below_seqs": batch_below_seqs,
    "error_positions": above_positions,
}
"""Who judges an error, by its kind."""
