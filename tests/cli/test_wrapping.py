"""Lines of a width, in either writing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hbmtwin.cli.wrapping import wrap


def test_words_stay_whole_and_chinese_is_parted_anywhere() -> None:
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("显存不足", 4) == ["显存", "不足"]
    assert wrap("显存 max_model_len 不足", 8) == ["显存", "max_model_len", "不足"]
    assert wrap("", 8) == [""]


@pytest.mark.parametrize("mark", ["，", "。", "）"])
def test_no_line_begins_with_a_mark_that_closes(mark: str) -> None:
    assert wrap(f"显存{mark}不足", 4) == ["显", f"存{mark}", "不足"]


def test_no_line_ends_with_a_bracket_that_opens() -> None:
    assert wrap("显存（不足）", 6) == ["显存", "（不", "足）"]


@given(st.text(alphabet="ab 显存，。（）1", max_size=60), st.integers(8, 30))
def test_nothing_is_lost_but_spaces_and_nothing_is_too_wide(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    for line in lines:
        assert cell_len(line) <= width or len(wrap(line, width)) == 1  # one word that is longer
        assert line == line.rstrip()
