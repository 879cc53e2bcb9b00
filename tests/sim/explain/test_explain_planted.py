"""Mistakes put in on purpose: each is one that a person could make, and a table or a count here has to notice it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hbmtwin.sim.explain import (
    engine_start,
    explaining,
    forms,
    plan,
    server,
)
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import Printed

from .engine_pastes import PASTES
from .test_engine_pastes import test_what_failed_is_told_with_its_cause_its_books_and_its_cures as held
from .test_explain_linear import lines_run


def _caught() -> bool:
    """Whether the table of pastes notices."""
    for paste in PASTES:
        try:
            held(paste)
        except (AssertionError, IndexError):
            return True
    return False


def test_the_table_holds_as_it_stands() -> None:
    assert not _caught()


def _swapped(need: int, limit: int) -> object:
    return plan.pool_facts(limit, need)


def _gigabytes(digits: str, unit: str) -> Printed:
    return Printed(int(float(digits) * 10**9))


def _first_rank(findings: Sequence[Finding], text: str) -> server.Server:
    return server.server_of([f for f in findings if f.rank != "TP1"], text)


def _no_shift(size: int, have: int) -> plan.Short:
    return plan.short_of(have, size)


BUGS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "need and room change places": (engine_start, "pool_facts", _swapped),
    "GiB are read as 10^9 bytes": (forms.Printed, "of", _gigabytes),
    "another rank than the one with the least room decides": (explaining, "server_of", _first_rank),
    "what is short has the wrong sign": (engine_start, "short_of", _no_shift),
    "commas end a number": (forms, "_put", lambda numbers, place, text, unit: numbers.update({place.name: 1})),
    "serving is not looked at": (explaining, "served", lambda findings, server: []),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_mistake_is_noticed(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = BUGS[bug]
    monkeypatch.setattr(where, name, wrong)
    assert _caught()


def test_a_reader_that_looks_at_every_pair_of_lines_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(lines: Sequence[Line]) -> list[Finding]:
        for one in lines:
            for other in lines:
                if one.text == other.text and one.number > other.number + 10**9:
                    return []
        return []

    monkeypatch.setattr(explaining, "READERS", (*explaining.READERS, pairs))
    text = "one line of a log\n"
    assert lines_run(text * 200) > 4.4 * lines_run(text * 50) + 3_000


def test_an_explanation_of_nothing_known_promises_nothing() -> None:
    empty = explain("hello\n")
    assert (empty.judgements, empty.tried, empty.scenario, empty.fit_command) == ((), (), "", "")
