"""What the command line prints for people: tables and sentences, from summaries and catalogs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hbmtwin.dashboard.verdict import (
    GIB,
    HEADER,
    Summary,
    bytes_text,
    fate,
    headline,
    oom_in_words,
    rejections_text,
    rows,
    seconds_text,
)

WIDE = 130
"""Columns that a comparison with one row a policy needs."""


def print_comparison(console: Console, summaries: Mapping[str, Summary], wall_s: float) -> None:
    """The verdict first, then one row a policy, then the deaths in words and how far to trust the times."""
    first = next(iter(summaries.values()))
    console.print(f"[bold]{escape(headline(summaries))}[/bold]")
    console.print(_comparison(summaries, wide=console.width >= WIDE))
    for name, summary in summaries.items():
        if summary["oom"] is not None:
            console.print(f"[bold]{escape(name)}[/bold]: {escape(oom_in_words(summary['oom']))}")
        if summary["requests_rejected"]:
            console.print(f"[bold]{escape(name)}[/bold]: rejected {escape(rejections_text(summary))}.")
    if any(s["oom"] is not None for s in summaries.values()):
        console.print("Latencies of a policy that died cover only what it lived through.", style="dim")
    console.print(
        f"Sizes, tokens and causes are exact for this traffic; times are estimates ({escape(str(first['basis']))}). "
        f"Ratios are means over time. GiB = 2^30 bytes. Took {wall_s:.1f} s.",
        style="dim",
    )


def _comparison(summaries: Mapping[str, Summary], *, wide: bool) -> Table:
    """One row a policy, or one column a policy where the terminal is too narrow for that."""
    cells = [[escape(cell) for cell in row] for row in rows(summaries)]
    styles = ["red" if summary["oom"] is not None else "" for summary in summaries.values()]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if wide:
        for position, title in enumerate(HEADER):
            table.add_column(title, justify="left" if position < 2 else "right", no_wrap=position != 1)
        for row, style in zip(cells, styles, strict=True):
            table.add_row(*row, style=style)
    else:
        table.add_column(HEADER[0])
        for row, style in zip(cells, styles, strict=True):
            table.add_column(row[0], justify="right", style=style)
        for title, *values in list(zip(HEADER, *cells, strict=True))[1:]:
            table.add_row(title.replace("\n", " "), *values)
    return table


def print_run(console: Console, name: str, summary: Summary, wall_s: float) -> None:
    """One run: how it ended, its numbers, and how far to trust them."""
    console.print(f"[bold]{escape(name)}: {escape(fate(summary))}[/bold]")
    if summary["oom"] is not None:
        console.print(escape(oom_in_words(summary["oom"])))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for label, text in _run_lines(summary):
        table.add_row(label, escape(text))
    console.print(table)
    console.print(
        f"Times are estimates ({escape(str(summary['basis']))}); sizes, tokens and causes are exact for this traffic. "
        f"Took {wall_s:.1f} s.",
        style="dim",
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
        ("preemptions", f"{s['preemptions']:,}"),
        (
            "peak memory",
            f"{bytes_text(s['peak_reserved_bytes'])} reserved, {bytes_text(s['peak_requested_bytes'])} requested, "
            f"of {bytes_text(s['capacity_bytes'])}",
        ),
        (
            "means over time",
            f"KV utilisation {_percent(s['kv_utilization_mean'])}, KV usage {_percent(s['kv_usage_mean'])}, "
            f"internal fragmentation {_percent(s['internal_fragmentation_mean'])}, "
            f"external {_percent(s['external_fragmentation_mean'])}",
        ),
        *((label, _percentiles(s[key])) for label, key in _LATENCIES),
        (
            "output",
            f"{s['simulated_output_tokens']:,} tokens in {seconds_text(s['makespan_s'])} of simulated time",
        ),
    ]


_LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("end to end", "e2e_s"), ("queue", "queue_s"))


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.1f} %"


def _percentiles(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {seconds_text(value)}" for name, value in values.items())


def print_devices(console: Console, devices: Mapping[str, Mapping[str, Any]]) -> None:
    """The devices of the catalog."""
    table = Table(
        "device", "vendor", "memory (GiB)", "bandwidth (GB/s)", "dense FP16 (TFLOP/s)", "KV block", box=box.SIMPLE_HEAD
    )
    for name, d in devices.items():
        table.add_row(
            name,
            d["vendor"],
            f"{d['memory_bytes'] / GIB:.2f}",
            f"{d['memory_bandwidth_bytes_per_s'] / 1e9:,.0f}",
            f"{d['peak_flops_per_s'] / 1e12:,.0f}",
            str(d["default_block_size"]),
        )
    console.print(table)


def print_models(console: Console, models: Mapping[str, Mapping[str, Any]]) -> None:
    """The models of the catalog; KV and weights of one rank that holds all of it."""
    table = Table(
        "model", "layers", "heads", "KV heads", "head size", "longest (tokens)", "KV (KiB/token)", "weights (GiB)",
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    for name, m in models.items():
        table.add_row(
            name,
            *(str(m[key]) for key in ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim")),
            f"{m['max_position_embeddings']:,}",
            f"{m['kv_token_bytes'] / 1024:,.0f}",
            f"{m['weight_bytes'] / GIB:.2f}",
        )
    console.print(table)


def print_policies(console: Console, policies: list[dict[str, Any]]) -> None:
    """Presets, and the policies of every family with what they say of themselves."""
    table = Table("family", "name", "what it is", "offers / needs", box=box.SIMPLE_HEAD)
    for p in policies:
        table.add_row(p["family"], p["name"], escape(p["summary"]), escape(", ".join(p["features"] + p["requires"])))
    console.print(table)
