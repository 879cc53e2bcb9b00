"""Columns of integers that are filled a chunk at a time; one whose value never changes takes no memory a row.

::

    append(1, 7, 0)  ...        bytearray   1 7 0 | 2 7 5 | 2 7 5     rows as they come, 8 bytes a value
                                                 columns(), when full
    Column.extend(chunk[:, j])  "id"        array   1 2 2 ...
                                "tenant"    7 * 3                      one value so far: kept once
                                "hits"      array   0 5 5 ...

The arrays are the frame's own in the end: nothing is copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

import numpy as np
import numpy.typing as npt
import pandas as pd

Ints = npt.NDArray[np.int64]

CHUNK_ROWS = 4096
"""Rows that wait to be sorted into columns: enough for numpy to be fast, and half a megabyte."""


class Chunk:
    """Rows of *width* integers, as they come."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.pack = Struct(f"{width}q").pack
        self.full_bytes = CHUNK_ROWS * width * 8
        self.packed = bytearray()

    def append(self, *row: int) -> bool:
        """Add a row; say whether it is time to take the rows. O(width), in C."""
        self.packed += self.pack(*row)
        return len(self.packed) >= self.full_bytes

    def columns(self) -> Ints:
        """The rows as they are, one column a line: a copy."""
        return np.frombuffer(self.packed, dtype=np.int64).reshape(-1, self._width).T.copy()

    def clear(self) -> None:
        """Forget them."""
        self.packed.clear()


class Column:
    """Integers in order, 8 bytes each; while they are all alike, one of them and their number."""

    __slots__ = ("_length", "_value", "_values")

    def __init__(self) -> None:
        self._value = 0
        self._length = 0
        self._values: array[int] | None = None

    def extend(self, values: Ints) -> None:
        """Add values. O(values)."""
        if not len(values):
            return
        if self._values is None:
            first = self._value if self._length else int(values[0])
            if (values == first).all():
                self._value = first
                self._length += len(values)
                return
            self._values = array("q", [first]) * self._length
        self._values.frombytes(values.tobytes())

    def array(self) -> Ints:
        """All of them, not copied: nothing can be added while this lives. Read-only where all are alike."""
        if self._values is None:
            return np.broadcast_to(np.int64(self._value), self._length)
        return np.frombuffer(self._values, dtype=np.int64)


class Columns:
    """Named columns of one length."""

    def __init__(self, names: Sequence[str]) -> None:
        self.columns = {name: Column() for name in names}

    def extend(self, columns: Iterable[Ints]) -> None:
        """Add as many values to each, in the order of the names. O(values)."""
        for column, values in zip(self.columns.values(), columns, strict=True):
            column.extend(values)

    def frame(self) -> pd.DataFrame:
        """All of them over the same memory: nothing can be added while it lives."""
        return pd.DataFrame({name: column.array() for name, column in self.columns.items()}, copy=False)
