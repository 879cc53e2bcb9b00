"""Columns that grow by chunks are those that would grow value by value, and what never changes costs nothing."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.sim.columns import CHUNK_ROWS, Chunk, Column, Columns

VALUES = st.sampled_from([-1, 0, 7, 2**62, -(2**63)])


@given(st.lists(st.lists(VALUES, max_size=4), max_size=6))
def test_a_column_is_what_was_added_to_it(chunks: list[list[int]]) -> None:
    column, plain = Column(), list[int]()
    for chunk in chunks:
        column.extend(np.array(chunk, dtype=np.int64))
        plain += chunk
    found = column.array()
    assert found.dtype == np.int64
    assert found.tolist() == plain


def test_one_value_so_far_takes_no_memory_and_then_all_of_it() -> None:
    column = Column()
    for _ in range(3):
        column.extend(np.full(1000, 7, dtype=np.int64))
    alike = column.array()
    assert (alike.shape, alike.strides, alike.flags.writeable) == ((3000,), (0,), False)
    column.extend(np.array([7, 8], dtype=np.int64))
    assert column.array().strides == (8,)
    assert column.array().tolist() == [7] * 3001 + [8]


def test_a_frame_is_made_over_the_columns_themselves() -> None:
    columns = Columns(["time", "same"])
    columns.extend([np.arange(4, dtype=np.int64), np.full(4, 5, dtype=np.int64)])
    frame = columns.frame()
    assert list(frame.columns) == ["time", "same"]
    assert set(frame.dtypes.astype(str)) == {"int64"}
    assert frame.to_numpy().tolist() == [[0, 5], [1, 5], [2, 5], [3, 5]]
    assert np.shares_memory(frame["time"].to_numpy(), columns.columns["time"].array())
    with pytest.raises(BufferError):  # what the frame sees cannot be moved
        columns.extend([np.arange(4, dtype=np.int64), np.arange(4, dtype=np.int64)])


def test_an_empty_frame_has_its_columns() -> None:
    columns = Columns(["a", "b"])
    columns.extend([np.empty(0, dtype=np.int64)] * 2)
    assert columns.frame().dtypes.astype(str).to_dict() == {"a": "int64", "b": "int64"}
    assert len(columns.frame()) == 0


def test_a_chunk_says_when_it_is_full_and_begins_anew() -> None:
    chunk = Chunk(2)
    assert [chunk.append(row, -row) for row in range(CHUNK_ROWS)] == [False] * (CHUNK_ROWS - 1) + [True]
    first, second = chunk.columns()
    assert first.tolist() == list(range(CHUNK_ROWS))
    assert second.tolist() == [-row for row in range(CHUNK_ROWS)]
    chunk.clear()
    assert chunk.append(1, 2) is False
    assert chunk.columns().tolist() == [[1], [2]]


@pytest.mark.parametrize("row", [(1, 2**63), (1, 1.5), (1,)])
def test_what_is_no_row_of_integers_is_an_error(row: tuple[int, ...]) -> None:
    with pytest.raises(struct.error):
        Chunk(2).append(*row)
