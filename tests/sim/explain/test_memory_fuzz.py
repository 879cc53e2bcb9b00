"""Whatever is pasted: the readers of memory messages never raise, and stay linear."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.sim.explain.judge import MOST_FAILURES
from hbmtwin.sim.explain.printed import MOST_PASSAGES

from .memory_pastes import PASTES
from .test_judge_pastes import findings_of, judged

TEXTS = [paste.text for paste in PASTES]
HUGE = ["9" * 20, "0", "0.00", "-1", "9" * 400, "1e308", "NaN", "\N{ARABIC-INDIC DIGIT FIVE}", "18446744073709551615"]


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 60), st.sampled_from([*HUGE, "", "\n", " ", "|"]))),
)
def test_mutated_pastes_are_no_trouble(texts: list[str], cuts: list[tuple[int, int, str]]) -> None:
    text = "\n".join(texts)
    for at, length, instead in cuts:
        text = text[:at] + instead + text[at + length :]
    for judgement in judged(text):
        said = (judgement.said, *judgement.arithmetic, *judgement.helps, *judgement.does_not_help)
        for each in said:
            assert each.text("en")
            assert each.text("zh")


@pytest.mark.parametrize("number", ["9" * 20, "9" * 20 + ".999999", "0"])
def test_no_number_overflows(number: str) -> None:
    for text in TEXTS:
        swapped = text
        for old in ("60.96", "23.70", "79.18", "2.00", "1.31", "3.00"):
            swapped = swapped.replace(old, number)
        for judgement in judged(swapped):
            assert "inf" not in " ".join(each.text() for each in judgement.arithmetic)


def test_failures_are_judged_up_to_a_number_of_them() -> None:
    rest = "MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already allocated; 19.52 MiB free)"
    text = "\n".join(f"NPU out of memory. Tried to allocate {size}.00 {rest}" for size in range(MOST_PASSAGES + 500))
    assert len(findings_of(text)) == MOST_PASSAGES
    assert len(judged(text)) == MOST_FAILURES


@pytest.mark.parametrize(
    "piece",
    [
        "1",
        "| 1 ",
        "|    0   N/A  N/A   3518784      C   x ",
        "Tried to allocate 2.00 GiB (GPU 0; ",
        "EL0004 size=1\n",
        "Process 12 has 1.00 GiB memory in use. ",
        'File "',
        "[rank7]: NPU out of memory. Tried to allocate 1.00 GiB\n",
        "'allocated_bytes.all.current': 1, ",
    ],
)
def test_time_grows_with_the_text_and_no_faster(piece: str) -> None:
    """Four times the text takes about four times as long: never sixteen. Of three tries the best counts."""

    def seconds(characters: int) -> float:
        text = (piece * (characters // len(piece) + 1))[:characters]
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            judged(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(400_000) < 10 * seconds(100_000) + 0.05
