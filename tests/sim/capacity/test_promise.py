"""What a run must keep: the words of the command line, and which of it a made-up row breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hbmtwin.sim.capacity.promise import Margin, Promise, Slo, kv_left_bytes, parse_margin, parse_slos, seconds
from hbmtwin.sim.scenario import ScenarioError
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row, Value

GIB = 1 << 30


def row(**values: Value) -> Row:
    """A run that holds, but for what is said."""
    held: Row = {
        **dict.fromkeys(ROW_COLUMNS),
        "outcome": "held",
        "capacity_bytes": 64 * GIB,
        "least_free_bytes": 4 * GIB,
        "kv_budget_bytes": 20 * GIB,
        "kv_usage_peak": 0.75,
        "preemptions": 0,
        "ttft_p99_s": 1.5,
        "tpot_p99_s": 0.08,
    }
    return {**held, **values}


def test_words_of_slos() -> None:
    assert parse_slos("ttft_p99=2s, tpot_p99=80ms,e2el_p50=1min,queue_p95=250us") == (
        Slo("ttft_p99", 2.0),
        Slo("tpot_p99", 0.08),
        Slo("e2e_p50", 60.0),
        Slo("queue_p95", 0.00025),
    )
    assert str(Slo("tpot_p99", 0.08)) == "tpot_p99 <= 80 ms"
    assert seconds(2.5) == "2.5 s"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tfft_p99=2s", "did you mean 'ttft_p99'"),
        ("ttft_p98=2s", "did you mean 'ttft_p99'"),
        ("ttft_p99", "write it as"),
        ("ttft_p99=2", "a number and its unit"),
        ("ttft_p99=2 sec", "a number and its unit"),
        ("ttft_p99=-2s", "a number and its unit"),
        ("ttft_p99=0s", "above 0"),
        ("ttft_p99=1s,ttft_p99=2s", "given twice"),
        (" , ", "empty"),
    ],
)
def test_slos_that_make_no_sense(text: str, told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        parse_slos(text)


def test_words_of_margins() -> None:
    assert parse_margin("2%") == Margin(share=0.02)
    assert parse_margin("1GiB") == Margin(bytes=GIB)
    assert parse_margin("2%").of(64 * GIB) == round(0.02 * 64 * GIB)
    assert parse_margin("0") == Margin()
    for text in ("100%", "3x", "-1GiB", "much"):
        with pytest.raises(ScenarioError, match="--margin"):
            parse_margin(text)


def test_a_run_that_keeps_all_of_it() -> None:
    promise = Promise(
        slos=(Slo("ttft_p99", 1.5), Slo("tpot_p99", 0.08)), margin=Margin(bytes=4 * GIB), max_preemptions=0
    )
    assert promise.broken(row()) == ()
    assert kv_left_bytes(row()) == 5 * GIB


@pytest.mark.parametrize(
    ("broken", "values"),
    [
        (("out_of_memory",), {"outcome": "out_of_memory", "cause": "shortage"}),
        (("does_not_fit",), {"outcome": "does_not_fit"}),
        (("standstill",), {"outcome": "standstill"}),
        (("rejected",), {"outcome": "rejected", "ttft_p99_s": 9.0}),
        (("unfinished",), {"requests_unfinished": 1}),
        (("unfinished",), {"requests_failed": 1}),
        (("preemptions",), {"preemptions": 1}),
        (("ttft_p99",), {"ttft_p99_s": 1.5001}),
        (("ttft_p99", "tpot_p99"), {"ttft_p99_s": None, "tpot_p99_s": 0.081}),
        (("margin",), {"least_free_bytes": 2 * GIB - 1}),
        (("margin",), {"kv_usage_peak": 0.91}),
        ((), {"requests_rejected": 3}),  # too long for the server, which is no want of memory
    ],
)
def test_what_a_run_breaks(broken: tuple[str, ...], values: dict[str, Value]) -> None:
    promise = Promise(
        slos=(Slo("ttft_p99", 1.5), Slo("tpot_p99", 0.08)), margin=Margin(bytes=2 * GIB), max_preemptions=0
    )
    assert promise.broken(row(**values)) == broken


def test_a_kv_cache_that_may_fill_has_the_margin_of_the_device_alone() -> None:
    promise = Promise(margin=Margin(bytes=2 * GIB), kv_may_fill=True)
    assert promise.broken(row(kv_usage_peak=1.0)) == ()
    assert promise.broken(row(least_free_bytes=GIB)) == ("margin",)
    assert replace(promise, kv_may_fill=False).broken(row(kv_usage_peak=1.0)) == ("margin",)
    assert promise.broken(row(preemptions=10**6)) == ()
