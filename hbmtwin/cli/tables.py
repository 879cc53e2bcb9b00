"""What the command line prints for people: tables and sentences, from summaries and catalogs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from hbmtwin.api import MemoryBudget, Scenario
from hbmtwin.dashboard.settings import setting_text, settings_table
from hbmtwin.dashboard.standstill import recomputed_text, standstill_in_words, unfinished_text
from hbmtwin.dashboard.verdict import (
    GIB,
    HEADER,
    MISSING,
    Summary,
    basis_text,
    bytes_text,
    cause_text,
    dropped_text,
    ended_early,
    fate,
    goodput_text,
    headline,
    number_text,
    oom_in_words,
    percent_text,
    rejections_text,
    rows,
    seconds_text,
    server_log,
)
from hbmtwin.workloads.plural import counted

WORDS = 24
"""Columns that a cell of several words gets at least, before a table is cut in two; less where there are no more."""

GAP = 3
"""Columns between two of a table."""


def print_comparison(
    console: Console,
    summaries: Mapping[str, Summary],
    wall_s: float,
    traffic: str = "",
    scenarios: Mapping[str, Scenario] | None = None,
) -> None:
    """The verdict first, then one row a policy, then the deaths in words and how far to trust the times.

    With *scenarios* also in which settings they differ.
    """
    console.print(f"[bold]{escape(headline(summaries))}[/bold]")
    styles = ["red" if ended_early(summary) else "" for summary in summaries.values()]
    print_table(console, HEADER, rows(summaries), words=("verdict",), styles=styles)
    if scenarios is not None:
        _print_settings(console, scenarios)
    for name, summary in summaries.items():
        if summary["oom"] is not None:
            console.print(f"[bold]{escape(name)}[/bold]: {escape(oom_in_words(summary['oom']))}")
        if summary.get("standstill"):
            console.print(f"[bold]{escape(name)}[/bold]: {escape(standstill_in_words(summary))}")
        if summary["requests_rejected"]:
            console.print(f"[bold]{escape(name)}[/bold]: rejected {escape(rejections_text(summary))}.")
        if summary["goodput"]:
            console.print(f"[bold]{escape(name)}[/bold]: goodput {escape(goodput_text(summary['goodput']))}.")
    if any(ended_early(s) for s in summaries.values()):
        console.print("Latencies of a policy that ended early cover only what it lived through.", style="dim")
    console.print(
        f"{traffic} Sizes, tokens and causes follow exactly from traffic, memory plan and order of events; the plan's "
        "activation and runtime bytes, and all times, are estimates "
        f"({escape(basis_text(summaries))}). Ratios are means over time. GiB = 2^30 bytes. "
        f"Took {wall_s:.1f} s.".lstrip(),
        style="dim",
    )


def _print_settings(console: Console, scenarios: Mapping[str, Scenario]) -> None:
    header, cells = settings_table(scenarios)
    if len(header) > 1:
        long = [title for place, title in enumerate(header) if max(len(row[place]) for row in cells) > WORDS]
        console.print("[bold]Settings that differ[/bold] (–: does not concern it)")
        print_table(console, header, cells, words=long)


def print_table(
    console: Console,
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    words: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> None:
    """Print a table with nothing cut off: what is too wide becomes several tables, each with the first column.

    Only the columns *words* are wrapped, and they stand left; the others are numbers or names.
    """
    left = list(range(1, len(header)))
    while left:
        count = len(left)
        while count > 1 and _width(console, _table(header, cells, [0, *left[:count]], words, styles)) > console.width:
            count -= 1
        table = _table(header, cells, [0, *left[:count]], words, styles)
        if _width(console, table) > console.width:  # with one column only: narrower still, its words broken
            names = _width(console, _table(header, cells, [0], words, styles))
            table.columns[1].width = max(1, console.width - names - GAP)
            table.columns[1].min_width = None
        console.print(table)
        console.print()
        left = left[count:]


def _table(
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    columns: Sequence[int],
    words: Sequence[str],
    styles: Sequence[str],
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)  # blank edges would cost a letter a line
    for column in columns:
        title, values = header[column], [row[column] for row in cells]
        lines = [line for text in (title, *values) for line in text.split("\n")]
        widest = max(cell_len(line) for line in lines)
        number = all(value[:1].isdigit() or value[:1] == MISSING for value in values)
        table.add_column(
            title,
            justify="right" if number and column > 0 and title not in words else "left",
            overflow="fold",
            min_width=min(widest, WORDS) if title in words else widest,
        )
    for row, style in zip_longest(cells, styles, fillvalue=""):
        table.add_row(*(escape(row[column]) for column in columns), style=style)
    return table


def _width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).minimum


def print_run(console: Console, name: str, summary: Summary, wall_s: float) -> None:
    """One run: how it ended, its numbers, and how far to trust them."""
    console.print(f"[bold]{escape(name)}: {escape(fate(summary))}[/bold]")
    if summary["oom"] is not None:
        console.print(escape(oom_in_words(summary["oom"])))
        if log := server_log(summary["oom"]):
            console.print(escape(log))
    if summary.get("standstill"):
        console.print(escape(standstill_in_words(summary)))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in _run_lines(summary):
        table.add_row(label, escape(text))
    console.print(table)
    if summary.get("stages"):  # results of older releases have none
        print_stages(console, summary["stages"])
    console.print(
        f"Times are estimates ({escape(str(summary['basis']))}); so are the memory plan's activation and "
        "runtime bytes. Sizes, tokens and causes follow exactly from these. "
        f"Took {wall_s:.1f} s.",
        style="dim",
    )


def print_stages(console: Console, stages: Sequence[Mapping[str, Any]]) -> None:
    """The memory of each stage of a pipeline, one rank of it, and which of them decides how many blocks there are."""
    header = (
        *("stage", "layers", "weights\n(GiB)", "activations\n(GiB)", "context,\nlibraries", "graphs\n(GiB)"),
        *("KV\n(GiB)", "a block\n(MiB)", "blocks", "spare\n(GiB)"),
    )
    cells = []
    for s in stages:
        outside = s["context_bytes"] + s["non_torch_bytes"] + s["late_bytes"]
        sizes = (s["weights_bytes"], s["activation_bytes"], outside, s["graph_bytes"], s["kv_bytes"])
        cells.append(
            [
                f"{s['stage']}, decides" if s["decides"] else str(s["stage"]),
                f"{s['first_layer']} to {s['first_layer'] + s['num_layers'] - 1}",
                *(f"{size / GIB:.2f}" for size in sizes),
                f"{s['kv_block_bytes'] / 2**20:.2f}",
                f"{s['num_blocks']:,}",
                f"{s['spare_bytes'] / GIB:.2f}",
            ]
        )
    print_table(console, header, cells)


def stage_columns(budget: MemoryBudget) -> str:
    """Where every byte of a device goes, a column for each stage of a pipeline that does not fit."""
    items = [line.item for line in budget.stages[0].lines]
    columns = [[line.bytes for line in b.lines] + [b.total_bytes] for b in budget.stages]
    text = "\n" + " " * 18 + "".join(f"{f'stage {b.stage}':>10}" for b in budget.stages) + "   (GiB)"
    for item, *sizes in zip([*items, "sum: the device"], *columns, strict=True):
        text += f"\n  {item:<16}" + "".join(f"{size / GIB:>10.2f}" for size in sizes)
    return text


def print_cures(console: Console, cures: Sequence[Mapping[str, Any]]) -> None:
    """The runs under single changes, the best first, with what each change costs."""
    held = [cure["change"] for cure in cures if cure["held"]]
    best = f"the best: {held[0]}" if held else "the first of them lived longest"
    count = f"{len(held)} of {len(cures)}" if held else f"none of {len(cures)}"
    console.print(f"[bold]What would have held: {count} single changes; {escape(best)}.[/bold]")
    header = ("change", "set", "verdict", "completed", "reserved\npeak (GiB)", "TPOT p50\n(ms)", "e2e p50\n(s)")
    cells = [
        (
            cure["change"],
            ", ".join(f"{key} = {setting_text(value)}" for key, value in cure["keys"].items()),
            _fate_of(cure),
            number_text(cure["requests_completed"]),
            number_text(cure["peak_reserved_bytes"], 1 / GIB, 2),
            number_text(cure["tpot_p50_s"], 1000, 1),
            number_text(cure["e2e_p50_s"], 1, 1),
        )
        for cure in cures
    ]
    styles = ["" if cure["held"] else "red" for cure in cures]
    print_table(console, header, cells, words=("set", "verdict"), styles=styles)


def _fate_of(cure: Mapping[str, Any]) -> str:
    if cure["cause"] == "does_not_fit":
        return "does not fit"
    end = "lived" if cure["died_at_s"] is None else f"died at {cure['died_at_s']:,.1f} s: {cause_text(cure)}"
    words = ["held" if cure["held"] else end]
    for key, one, many in _COSTS_OF_A_CURE:
        if count := cure[key]:
            words.append(f"{count:,} {many if count > 1 else one}")
    return ", ".join(words)


_COSTS_OF_A_CURE = (
    ("preemptions", "preemption", "preemptions"),
    ("requests_rejected", "rejected", "rejected"),
    ("dropped_tokens", "token dropped", "tokens dropped"),
)


def _prefix_text(cache: Mapping[str, Any]) -> str:
    """Tokens found of those asked for, as the simulated release counts them."""
    again = cache["preempted_requests"]
    return (
        f"{percent_text(cache['hit_rate'])} hit rate, {cache['hits']:,} of {cache['queries']:,} tokens found, "
        f"{counted(cache['requests'], 'request')}" + (f" ({again:,} more after a preemption)" if again else "")
    )


def _run_lines(s: Summary) -> list[tuple[str, str]]:
    rejected = sum(s["requests_rejected"].values())
    return [
        (
            "requests",
            f"{s['requests_completed']:,} of {s['requests_total']:,} completed, {rejected:,} rejected"
            + (f" ({rejections_text(s)})" if rejected else "")
            + f", {s['requests_failed']:,} failed, {s['requests_unfinished']:,} unfinished",
        ),
        *([("", text)] if (text := unfinished_text(s)) else []),
        ("preemptions", f"{s['preemptions']:,}"),
        *([("recomputed tokens", recomputed_text(s))] if s["recomputed_tokens"] else []),
        *([("dropped tokens", dropped_text(s))] if s["dropped_tokens"] else []),
        *([("prefix cache", _prefix_text(s["prefix_cache"]))] if s["prefix_cache"] else []),
        (
            "peak memory",
            f"{bytes_text(s['peak_reserved_bytes'])} reserved, {bytes_text(s['peak_requested_bytes'])} requested, "
            f"of {bytes_text(s['capacity_bytes'])}",
        ),
        (
            "means over time",
            f"KV utilisation {percent_text(s['kv_utilization_mean'])}, KV usage {percent_text(s['kv_usage_mean'])}, "
            f"internal fragmentation {percent_text(s['internal_fragmentation_mean'])}, "
            f"external {percent_text(s['external_fragmentation_mean'])}",
        ),
        *((label, _percentiles(s[key])) for label, key in _LATENCIES if s[key] is not None),
        *([("goodput", goodput_text(s["goodput"]))] if s["goodput"] else []),
        (
            "output",
            f"{s['simulated_output_tokens']:,} tokens in {seconds_text(s['makespan_s'])} of simulated time",
        ),
    ]


_LATENCIES = (
    *(("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s")),
    *(("end to end", "e2e_s"), ("queue", "queue_s")),
)


def _percentiles(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {seconds_text(value)}" for name, value in values.items())


def print_models(console: Console, models: Mapping[str, Mapping[str, Any]]) -> None:
    """The models of the catalog; KV and weights of one rank that holds all of it."""
    header = (
        *("model", "layers", "heads", "KV\nheads", "head\nsize", "longest\n(tokens)"),
        *("KV (KiB\nper token)", "weights\n(GiB)", "at Hugging Face"),
    )
    cells = [
        (
            name,
            *(str(m[key]) for key in ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim")),
            f"{m['max_position_embeddings']:,}",
            f"{m['kv_token_bytes'] / 1024:,.0f}",
            f"{m['weight_bytes'] / GIB:.2f}",
            ", ".join(m["hugging_face_ids"]),
        )
        for name, m in models.items()
    ]
    print_table(console, header, cells, words=header[-1:])


def print_policies(console: Console, policies: Sequence[Mapping[str, Any]]) -> None:
    """Everything that a scenario chooses by name, a table a family, with what each says of itself."""
    for family, entries in groupby(policies, key=itemgetter("family")):
        listed = list(entries)
        console.print(f"[bold]{escape(family)}[/bold]  {escape(listed[0]['key'])}")
        header, cells = ["name", "what it is"], [[p["name"], p["summary"]] for p in listed]
        if any(p["features"] or p["requires"] for p in listed):
            header += ["offers", "needs of its arena"]
            for row, p in zip(cells, listed, strict=True):
                row += [", ".join(p["features"]), ", ".join(p["requires"])]
        print_table(console, header, cells, words=header[1:3])


def print_workloads(console: Console, workloads: Mapping[str, Mapping[str, Any]]) -> None:
    """Workloads that have a name, with whose data they are; ``--json`` has the keys, each with its source."""
    cells = [(name, w["summary"], w["credit"]) for name, w in workloads.items()]
    console.print("[bold]workload[/bold]  workload.preset (--json: the keys of each, with the source of every number)")
    print_table(console, ("name", "what it is", "source"), cells, words=("what it is", "source"))
