"""Tables of the Memory map: every term of the books has a name, and units are those that people read."""

from __future__ import annotations

from dataclasses import fields

import pandas as pd

from hbmtwin.allocators.oom import OomFacts
from hbmtwin.dashboard.app.memory_tables import TERMS, books_table, operations_table

MIB, GIB = 1 << 20, 1 << 30


def test_every_term_of_the_books_has_words() -> None:
    terms = {field.name for field in fields(OomFacts) if field.name.endswith("_bytes")} | {"free_bytes"}
    assert set(TERMS) == terms


def test_the_books_are_told_in_mib_without_what_is_nothing() -> None:
    table = books_table({"need_bytes": 3 * MIB, "free_bytes": 2 * MIB, "parked_bytes": 0, "cause": "shortage"})
    assert table.to_numpy().tolist() == [["what must lie in one piece (rounded)", 3.0], ["free in all", 2.0]]


def test_operations_are_told_in_units_and_what_frees_has_no_size() -> None:
    row = {
        "op_index": 7,
        "allocator": "caching",
        "op": "malloc",
        "id": 3,
        "size": 2 * MIB,
        "stream": 0,
        "tag": "kv",
        "owner": 60,
        "time_ns": 1_500_000_000,
        "step": 9,
        "reserved_bytes": GIB,
        "used_bytes": 0,
        "free_bytes": GIB // 2,
        "largest_free_bytes": GIB // 4,
    }
    freed = {**row, "op_index": 8, "op": "free", "size": 0, "tag": "", "owner": -1}
    first, second = operations_table(pd.DataFrame([row, freed])).to_dict("records")
    assert first == {
        "operation": 7,
        "time (s)": 1.5,
        "step": 9,
        "what": "malloc",
        "for": "KV cache",
        "request": 60,
        "size (MiB)": 2.0,
        "reserved (GiB)": 1.0,
        "free (GiB)": 0.5,
        "largest (GiB)": 0.25,
    }
    assert pd.isna(second["request"])
    assert pd.isna(second["size (MiB)"])
