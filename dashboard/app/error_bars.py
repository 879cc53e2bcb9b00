"""Error bars on a page: the button that asks for them, how far they are, and the answer of ``--error-bars``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from hbmtwin.api import CatalogError, DoesNotFit, Result, ScenarioError, runs_for_error_bars
from hbmtwin.dashboard.app import jobs
from hbmtwin.dashboard.app.language import as_text, lang, text
from hbmtwin.dashboard.app.wrong import show_wrong
from hbmtwin.dashboard.error_bar_words import (
    NONE,
    ONE_AT_A_TIME,
    bar_header,
    bar_rows,
    compared_rows,
    end_header,
    end_rows,
    fate_sentence,
    most_sentence,
    order_sentences,
    origin_text,
    sentences,
    shown,
)
from hbmtwin.sim.phrases import Phrase

SLOT = "error-bars"
UNBROKEN = "\N{NO-BREAK SPACE}"
"""Between a number and its unit."""
TITLE = Phrase("Error bars", "误差范围")
ASK = Phrase("How far may these numbers be off? ({runs} runs)", "这些数字可能偏差多少？（{runs} 次运行）")
ASK_HELP = Phrase(
    "Runs it again with one uncertain figure at a time (bandwidths, overheads, activations) at its low and high end.",
    "每次把一个不确定的参数（带宽、开销、激活显存等）取到下限或上限，重新运行。",
)
RUNS = Phrase("{runs} of {total} runs", "已完成 {runs} / {total} 次运行")
THE_RUN = Phrase("the run", "本次运行")
ENDS = Phrase("{name}: all ends", "{name}：全部取值")
ORIGIN = Phrase("origin", "来源")

Told = Mapping[str, Any]


def wanted(page: str, results: Mapping[str, Result]) -> bool:
    """Whether they are there, or under way."""
    key = _key(results)
    return key in st.session_state.get(SLOT, {}) or jobs.under_way(_slot(page), key)


def show(page: str, results: Mapping[str, Result]) -> None:
    """Draw the button that asks, or the answer: of one run, which needs no name, or of several with their order."""
    key, slot = _key(results), _slot(page)
    told: Mapping[str, Told] | None = st.session_state.get(SLOT, {}).get(key)
    if told is not None:
        st.subheader(text(TITLE))
        _one(*next((name or text(THE_RUN), one) for name, one in told.items())) if len(told) == 1 else _several(told)
        return
    try:
        runs = runs_for_error_bars({name: result.scenario for name, result in results.items()})
    except (ScenarioError, CatalogError, DoesNotFit) as error:  # a profile that is not there any more
        show_wrong(error)
        return
    if not runs:
        st.caption(text(NONE))
        return
    pressed = st.button(
        text(ASK, runs=runs), key="ask-error-bars", help=text(ASK_HELP), disabled=jobs.under_way(slot, key)
    )
    job = {"verb": "error_bars", "results": {name: _directory(result) for name, result in results.items()}}
    if pressed and jobs.start(slot, key, job):
        st.rerun()
    task = jobs.done(slot, key, lambda said: (said["runs"] / said["total"], text(RUNS, **said)))
    if task is not None:
        st.session_state.setdefault(SLOT, {})[key] = task.outcome["told"]
        st.rerun()


def _one(name: str, told: Told) -> None:
    for sentence in sentences(told, name, lang()):
        st.markdown(as_text(sentence))
    rows = [(row[0], *(cell.replace(" ", UNBROKEN) for cell in row[1:4]), *row[4:]) for row in bar_rows(told, lang())]
    st.table(pd.DataFrame(rows, columns=bar_header(lang())), hide_index=True)
    st.caption(as_text(origin_text(told)))
    _ends(name, told)


def _several(named: Mapping[str, Told]) -> None:
    columns = [bar_header(lang())[0], *(as_text(name) for name in named)]
    st.table(pd.DataFrame(compared_rows(named, lang()), columns=columns), hide_index=True)
    for sentence in order_sentences(named, lang()):
        st.markdown(as_text(sentence))
    ends = len(next(iter(named.values()))["ends"])
    st.caption(as_text(text(ONE_AT_A_TIME, ends=ends)))
    for name, told in named.items():
        st.markdown(as_text(f"{fate_sentence(told, name, lang())} {most_sentence(told, lang())}"))
    st.caption(as_text(origin_text(next(iter(named.values())))))
    for name, told in named.items():
        _ends(name, told)


def _ends(name: str, told: Told) -> None:
    """Every run that was made; without the numbers that none of them has."""
    rows, header = end_rows(told, lang()), end_header(lang())
    table = pd.DataFrame(rows, columns=header)
    own = len(header) - len(told["bars"])
    kept = [*header[:own], *(header[own + place] for place, m in enumerate(told["bars"]) if m in shown(told))]
    table = table[kept].assign(**{text(ORIGIN): [end["basis"] or "" for end in told["ends"]]})
    with st.expander(as_text(text(ENDS, name=name))):
        st.dataframe(table, hide_index=True, height="content")


def _slot(page: str) -> str:
    return f"{SLOT}-{page}"


def _key(results: Mapping[str, Result]) -> str:
    return f"{SLOT} " + " ".join(f"{name}={jobs.key_of(result.scenario)}" for name, result in results.items())


def _directory(result: Result) -> str:
    return str(jobs.shared().kept.path(jobs.key_of(result.scenario)))
