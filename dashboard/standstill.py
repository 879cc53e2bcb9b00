"""Runs that got nowhere, in words: a standstill with its cause and its cure, and how much was computed again."""

from __future__ import annotations

from hbmtwin.dashboard.verdict import Summary, bytes_text, percent_text

NAMED = 5
"""Requests of a standstill that are told by number."""


def standstill_in_words(summary: Summary) -> str:
    """What came to a standstill, why, and which settings would have kept it going."""
    found = summary["standstill"]
    who = _requests(found["requests"], found["num_requests"])
    if found["kind"] == "deadlock":
        stuck = "runs or waits" if found["num_requests"] == 1 else "run or wait"
        return (
            f"Deadlock at {found['time_s']:,.3f} s: {who} {stuck}, the scheduler plans nothing for them, and no "
            "other request is to come. That is a fault of the scheduler or of the KV policy, not of a setting: take "
            "another scheduler.policy (vllm), and report this one with its scenario."
        )
    need, pool = found["kv_bytes"], found["kv_pool_bytes"]
    size = bytes_text(need)
    fitting = max(1, found["num_requests"] * pool // max(need, pool + 1))
    return (
        f"Live-lock from {found['since_s']:,.3f} s: {who} give way to one another, {found['preemptions']:,} times by "
        f"{found['time_s']:,.3f} s, are computed again, and none gets another token: the same state came again and "
        f"again. At full length they take {size} ({found['tokens']:,} tokens), and there are {bytes_text(pool)} of KV. "
        f"Cure: scheduler.policy = 'vllm', which always lets one go on; scheduler.max_num_seqs = {fitting}; "
        "memory.admission = 'reserve' where the KV policy has it; or more memory (engine.gpu_memory_utilization)."
    )


def _requests(ids: list[int], count: int) -> str:
    named = ", ".join(str(id) for id in ids[:NAMED])
    more = f" and {count - NAMED:,} more" if count > NAMED else ""
    return f"request {named}" if count == 1 else f"requests {named}{more}"


def recomputed_text(summary: Summary) -> str:
    """Tokens that preemptions made the server compute again, and their share of all."""
    share = percent_text(summary["recomputed_share"])
    return f"{summary['recomputed_tokens']:,} of {summary['computed_tokens']:,} computed ({share})"


def thrashing_text(summary: Summary) -> str:
    """In which minutes the server undid its preemptions for most of the time, and what would spare it."""
    found = summary["thrashing"]
    minutes = f"in {found['minutes']:,} minutes" if found["minutes"] > 1 else "in one minute"
    return (
        f"thrashing {minutes}, first from {found['first_s']:,} s: at least half of what was computed had been computed "
        f"before ({percent_text(found['worst_share'])} in the minute from {found['worst_s']:,} s); fewer "
        "scheduler.max_num_seqs, memory.admission = 'reserve' or more memory for KV would spare it"
    )


def unfinished_text(summary: Summary) -> str:
    """Why requests were never sent; empty where all were."""
    return "; ".join(f"{count:,} unfinished: {why}" for why, count in summary["unfinished_because"].items())
