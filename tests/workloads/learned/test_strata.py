"""Stratified draws: one of each 1024th, keyed, and nothing told by the neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads.draws import Purpose, uniform
from hbmtwin.workloads.learned.strata import STRATA, client_keys, stratified

SEEDS = st.integers(-(2**63), 2**63 - 1)
CLIENTS = st.integers(0, 2**19 - 1)
CELLS = st.integers(0, 2**20)


def naive(seed: int, client: int, serial: int) -> float:
    """Four rounds over two halves of five bits, by single draws, from the module's description."""
    cell, place = divmod(serial, 1024)
    left, right = divmod(place, 32)
    for turn in range(4):
        key = ((client << 40 | cell) << 5 | right) % 2**64
        left, right = right, left ^ int(uniform(seed, Purpose.PROMPT_TOKENS, key, turn) * 32)
    within = uniform(seed, Purpose.PROMPT_TOKENS, client << 40 | serial, 4)
    return min((left * 32 + right + within) / 1024, 1 - 2.0**-53)


@given(SEEDS, CLIENTS, CELLS)
def test_every_1024_numbers_have_one_in_each_stratum(seed: int, client: int, cell: int) -> None:
    serials = np.arange(cell * STRATA, (cell + 1) * STRATA, dtype=np.int64)
    u = stratified(seed, Purpose.PROMPT_TOKENS, client, serials)
    assert sorted((u * STRATA).astype(int).tolist()) == list(range(STRATA))
    assert 0 < u.min() <= u.max() < 1


@given(SEEDS, CLIENTS, CELLS, st.lists(st.integers(0, 1023), min_size=1, max_size=5))
def test_a_number_hangs_on_its_key_alone(seed: int, client: int, cell: int, places: list[int]) -> None:
    serials = np.array(places, dtype=np.int64) + cell * STRATA
    drawn = stratified(seed, Purpose.PROMPT_TOKENS, client, serials).tolist()
    assert drawn == [naive(seed, client, serial) for serial in serials.tolist()]


def test_neighbours_purposes_clients_and_cells_tell_nothing() -> None:
    serials = np.arange(64 * STRATA, dtype=np.int64)
    u = stratified(3, Purpose.PROMPT_TOKENS, 0, serials)
    others = [
        np.roll(u, 1),
        np.roll(u, STRATA),
        stratified(3, Purpose.OUTPUT_TOKENS, 0, serials),
        stratified(3, Purpose.PROMPT_TOKENS, 1, serials),
        stratified(4, Purpose.PROMPT_TOKENS, 0, serials),
    ]
    for other in others:
        assert abs(float(np.corrcoef(u, other)[0, 1])) < 4 / np.sqrt(len(u))
    firsts = stratified(3, Purpose.PROMPT_TOKENS, 0, np.arange(0, 4000 * STRATA, STRATA, dtype=np.int64))
    assert float(firsts.mean()) == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 4000))
    assert len(set(firsts.tolist())) == 4000


def test_keys_of_clients_do_not_meet() -> None:
    assert int(client_keys(5, np.array([7]))[0]) == 5 * 2**40 + 7
