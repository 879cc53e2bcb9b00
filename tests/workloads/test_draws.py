"""A draw depends on its key, and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import draws
from hbmtwin.workloads.draws import Purpose

Draw = Callable[[int, int], float]
KEYS = [(session, turn) for session in range(40) for turn in range(5)]


def assert_free_of_order(new_source: Callable[[], Draw]) -> None:
    """Whoever asks in another order, or for less, gets the same numbers."""
    forward, backward, alone = new_source(), new_source(), new_source()
    straight = {key: forward(*key) for key in KEYS}
    assert {key: backward(*key) for key in reversed(KEYS)} == straight
    assert alone(39, 4) == straight[39, 4]


def test_the_mixer_is_splitmix64() -> None:
    # The reference generator's first outputs for the state 1234567.
    outputs = [draws._mix(1234567 + 0x9E3779B97F4A7C15 * n) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_bits_never_change_from_one_version_to_the_next() -> None:
    assert draws.bits(0, "arrival", 0, 0) == 6024263706080898116
    assert draws.bits(0, "arrival", 0, 1) == 4224812007119188446
    assert draws.bits(0, "arrival", 1, 0) == 2691012105172057492
    assert draws.bits(1, "arrival", 0, 0) == 7567642894678185026
    assert draws.bits(0, "turns", 0, 0) == 16548272225987709196
    assert draws.uniform(0, "arrival", 0, 0) == 0.32657598988792425


def test_a_purpose_is_its_name() -> None:
    assert draws.bits(3, Purpose.TURNS, 5, 7) == draws.bits(3, "turns", 5, 7)


@given(
    seed=st.integers(-(2**70), 2**70),
    sessions=st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
    turn=st.integers(0, 2**40),
    purpose=st.sampled_from(list(Purpose)),
)
def test_arrays_and_scalars_draw_the_same_bits(seed: int, sessions: list[int], turn: int, purpose: str) -> None:
    many = draws.uniforms(seed, purpose, np.array(sessions, dtype=np.int64), turn)
    assert many.tolist() == [draws.uniform(seed, purpose, session, turn) for session in sessions]


def test_draws_do_not_depend_on_the_order_of_asking() -> None:
    assert_free_of_order(lambda: lambda session, turn: draws.uniform(0, "turns", session, turn))


def test_a_shared_stream_would_be_caught() -> None:
    def stream() -> Draw:
        generator = random.Random(0)
        return lambda session, turn: generator.random()

    with pytest.raises(AssertionError):
        assert_free_of_order(stream)


def test_the_ends_of_the_interval_are_never_drawn() -> None:
    assert 0.0 < (0 + 0.5) * 2.0**-52
    assert ((2**64 - 1 >> 12) + 0.5) * 2.0**-52 < 1.0
    u = draws.uniforms(0, "turns", np.arange(100_000), 0)
    assert 0.0 < u.min() < 1e-4
    assert 1.0 - 1e-4 < u.max() < 1.0


@pytest.mark.parametrize(("seed", "purpose", "turn"), [(0, "arrival", 0), (0, "think_time", 3), (12345, "turns", 1)])
def test_draws_are_uniform_over_sessions(seed: int, purpose: str, turn: int) -> None:
    n = 20_000
    u = np.sort(draws.uniforms(seed, purpose, np.arange(n), turn))
    distance = np.max(np.abs(u - (np.arange(n) + 0.5) / n)) + 0.5 / n
    assert distance < 1.63 / np.sqrt(n)  # Kolmogorov-Smirnov, 1 % level


def test_draws_are_uniform_over_turns() -> None:
    n = 5_000
    u = np.sort([draws.uniform(0, "output_tokens", 17, turn) for turn in range(n)])
    assert np.max(np.abs(u - (np.arange(n) + 0.5) / n)) + 0.5 / n < 1.63 / np.sqrt(n)


def test_keys_that_differ_in_one_part_are_uncorrelated() -> None:
    n = 20_000
    sessions = np.arange(n)
    base = draws.uniforms(0, "prompt_tokens", sessions, 0)
    others = {
        "purpose": draws.uniforms(0, "output_tokens", sessions, 0),
        "seed": draws.uniforms(1, "prompt_tokens", sessions, 0),
        "turn": draws.uniforms(0, "prompt_tokens", sessions, 1),
        "session": draws.uniforms(0, "prompt_tokens", sessions + 1, 0),
    }
    for part, other in others.items():
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / np.sqrt(n), part


def test_a_million_keys_do_not_collide() -> None:
    drawn = np.concatenate([draws.uniforms(0, "turns", np.arange(100_000), turn) for turn in range(10)])
    # On a grid of 2^52, a million draws have 1e-4 equal pairs in the mean.
    assert len(np.unique(drawn)) == 1_000_000


def test_every_purpose_has_its_own_name() -> None:
    first = {purpose: draws.bits(0, purpose, 0, 0) for purpose in Purpose}
    assert len(set(first.values())) == len(Purpose) >= 20
