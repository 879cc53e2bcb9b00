"""Results in words and rows: what the terminal and the report both say about a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hbmtwin.api import RULES, Result, differences

Summary = Mapping[str, Any]

GIB = 2**30
MISSING = "–"

CAUSES = {
    "never_fits": "It would not fit even in the empty device.",
    "allocator_rule": "A free piece is large enough, but a rule of the allocator bars it",
    "external_fragmentation": "Enough is free in all, but no single piece is large enough.",
    "growth_copy": "The old copies of growing buffers, which live until the step ends, hold what it needs.",
    "reservation": "Room that is held, but filled by no token, is what it needs.",
    "parked_history": "Histories that are kept between turns hold what it needs.",
    "other_tenant": "Other processes on the device hold what it needs.",
    "runtime_peak": "Activations and frees that wait for an event hold what it needs.",
    "shortage": "The device is full of live data.",
}
"""What each cause of an out-of-memory record means."""

TAGS = {"weight": "weights", "activation": "activations", "workspace": "workspace", "kv": "KV"}

SLO_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end to end"}

HEADER = (
    "policy",
    "verdict",
    "completed",
    "KV util.\n(%)",
    "internal\n(%)",
    "external\n(%)",
    "reserved\npeak (GiB)",
    "TTFT p50 / p99\n(s)",
    "TPOT p50\n(ms)",
    "makespan\n(s)",
)
"""Columns of :func:`rows`."""


def fate(summary: Summary) -> str:
    """How a run ended, in a few words."""
    if served_nothing(summary):
        return f"served nothing: {_all_rejected(summary)}"
    words = [_end(summary)]
    if preemptions := summary["preemptions"]:
        words.append(f"{preemptions:,} preemptions" if preemptions > 1 else "1 preemption")
    if summary.get("thrashing"):
        words.append("thrashing")
    if rejected := sum(summary["requests_rejected"].values()):
        words.append(f"{rejected:,} rejected")
    if turns := summary["turns_with_dropped_tokens"]:
        words.append(f"{turns:,} turns lost tokens" if turns > 1 else "1 turn lost tokens")
    return ", ".join(words)


def short_fate(summary: Summary) -> str:
    """:func:`fate` for a narrow place: the end alone if it came early, or what a run that held did beside it."""
    return _end(summary) if ended_early(summary) else fate(summary)


def ended_early(summary: Summary) -> bool:
    """Whether a run ended before its traffic did: the server died, or nothing could go on."""
    return summary["oom"] is not None or summary.get("standstill") is not None


def _end(summary: Summary) -> str:
    if (oom := summary["oom"]) is not None:
        return f"died at {oom['time_s']:,.1f} s: {cause_text(oom)}"
    if (standstill := summary.get("standstill")) is not None:
        return _stood_still(standstill)
    return "held"


def _stood_still(standstill: Summary) -> str:
    locked = "live-locked" if standstill["kind"] == "live_lock" else "deadlocked"
    return f"{locked} at {standstill['time_s']:,.1f} s"


def served_nothing(summary: Summary) -> bool:
    """Whether a server lived through its traffic by refusing all of it."""
    return not (ended_early(summary) or summary["requests_completed"]) and bool(summary["requests_rejected"])


def _all_rejected(summary: Summary) -> str:
    rejected = sum(summary["requests_rejected"].values())
    return f"all {rejected:,} requests rejected" if rejected > 1 else "the only request rejected"


def cause_text(oom: Summary) -> str:
    """The cause of an out-of-memory record as words."""
    return str(oom["cause"]).replace("_", " ")


def headline(summaries: Mapping[str, Summary]) -> str:
    """One sentence: who held, who died of what."""
    parts = []
    held = [name for name, s in summaries.items() if not (ended_early(s) or served_nothing(s))]
    if held:
        parts.append(f"{_listed(held)} held")
    for name, summary in summaries.items():
        if served_nothing(summary):
            parts.append(f"{name} served nothing ({_all_rejected(summary)})")
        if (oom := summary["oom"]) is not None:
            parts.append(f"{name} died at {oom['time_s']:,.1f} s ({cause_text(oom)})")
        elif (standstill := summary.get("standstill")) is not None:
            parts.append(f"{name} {_stood_still(standstill)}")
    return "; ".join(parts) + "."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def bytes_text(count: int) -> str:
    """Bytes in the binary unit that suits them."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count} B"


def oom_in_words(oom: Summary) -> str:
    """An out-of-memory record as three sentences: when and what asked, what was free, and why that did not do."""
    who = f"request {oom['request']}" if oom["request"] >= 0 else "the server"
    what = f" of {TAGS.get(oom['tag'], oom['tag'])}" if oom["tag"] else ""
    because = CAUSES.get(oom["cause"], "")
    if oom["cause"] == "allocator_rule":
        because += f": {RULES.get(oom['rule'], oom['rule'])}."
    need, free, largest = (bytes_text(oom[f"{key}_bytes"]) for key in ("need", "free", "largest_free"))
    whole = oom["free_bytes"] == oom["largest_free_bytes"]  # blocks of a pool, or a single hole
    asked = f"asks for {need}{what}" + ("" if whole else " in one piece")
    found = f"{free} are free" + ("" if whole else f" in all, the largest piece is {largest}")
    return f"Out of memory at {oom['time_s']:.3f} s, cause {cause_text(oom)}: {who} {asked}. {found}. {because}"


def server_log(oom: Summary) -> str:
    """What the log of a real server would say, as a sentence; empty where nothing is known of it."""
    message = oom.get("torch_message", "")
    return f'The server\'s log would say: "{message}"' if message else ""


def rows(summaries: Mapping[str, Summary]) -> list[tuple[str, ...]]:
    """The comparison table: one row a policy, cells as text in the units of :data:`HEADER`."""
    return [
        (
            name,
            fate(s),
            f"{s['requests_completed']:,} / {s['requests_total']:,}",
            number_text(s["kv_utilization_mean"], 100, 1),
            number_text(s["internal_fragmentation_mean"], 100, 1),
            number_text(s["external_fragmentation_mean"], 100, 1),
            number_text(s["peak_reserved_bytes"], 1 / GIB, 2),
            f"{number_text(s['ttft_s']['p50'], 1, 2)} / {number_text(s['ttft_s']['p99'], 1, 2)}",
            number_text(s["tpot_s"]["p50"], 1000, 1),
            number_text(s["makespan_s"], 1, 1),
        )
        for name, s in summaries.items()
    ]


def number_text(value: float | None, factor: float = 1, digits: int = 0) -> str:
    """A number in another unit, or a dash where there is none."""
    return MISSING if value is None else f"{value * factor:,.{digits}f}"


def same_traffic(results: Mapping[str, Result]) -> str:
    """What the policies of a comparison share of their traffic: all of it, or all but when turns arrive."""
    if changed := traffic_changes(results):
        return f"The runs do not have the same traffic: they differ in {_listed(changed)}."
    closed = any(result.scenario.workload.users is not None for result in results.values())
    if closed or any((result.requests["turn"] > 0).any() for result in results.values()):
        why = "a user waits for each answer" if closed else "a turn waits for the answer before it"
        return f"Lengths and think times are the same under every policy; arrivals of later turns may differ: {why}."
    return "Every policy gets the same requests at the same times."


def traffic_changes(results: Mapping[str, Result]) -> list[str]:
    """The keys of traffic in which the runs of a comparison differ."""
    scenarios = {name: result.scenario for name, result in results.items()}
    return [key for key in differences(scenarios) if _is_of_traffic(key)]


def _is_of_traffic(key: str) -> bool:
    return key == "seed" or (key.startswith(("workload.", "session.")) and key != "session.between_turns")


def rejections_text(summary: Summary) -> str:
    """Rejected requests by reason; empty when none was."""
    return ", ".join(f"{count:,} {reason}" for reason, count in summary["requests_rejected"].items())


def percent_text(ratio: float | None) -> str:
    """A ratio as percent, or a dash where there is none."""
    return MISSING if ratio is None else f"{100 * ratio:.1f} %"


def goodput_text(goodput: Summary) -> str:
    """Requests a second that met every objective, their share, and the share that met each where there are several."""
    rate = number_text(goodput["requests_per_s"], 1, 3)
    text = f"{rate} requests/s, {goodput['requests_met']:,} met the SLO ({percent_text(goodput['share_met'])})"
    each = goodput["share_met_by_slo"]
    if len(each) > 1:
        words = (f"{SLO_NAMES[key]} {percent_text(share)}" for key, share in each.items())
        text += f": {', '.join(words)}"
    return text if goodput["attained"] else f"{text}; missed"


def dropped_text(summary: Summary) -> str:
    """How many tokens retention dropped, of how many turns."""
    turns = summary["turns_with_dropped_tokens"]
    return (
        f"{summary['dropped_tokens']:,}, of {turns:,} turns"
        if turns > 1
        else f"{summary['dropped_tokens']:,}, of 1 turn"
    )


def seconds_text(seconds: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if seconds is None:
        return MISSING
    return f"{seconds * 1000:,.1f} ms" if 0 < seconds < 1 else f"{seconds:,.2f} s"
