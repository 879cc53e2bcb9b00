"""Growth rules: how large a buffer is made for the tokens that it must hold."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.growth import (
    GROWTH_RULES,
    Doubling,
    Exact,
    GrowthRule,
    Hybrid,
    Static,
    Step,
    growth_rule,
)

SETTINGS: dict[str, object] = {
    "initial_tokens": 64,
    "growth_factor": 2,
    "step_tokens": 256,
    "decode_growth": "doubling",
    "max_model_len": 4096,
    "tensors": "merged",
}


def assert_smallest_power_that_holds(rule: GrowthRule, tokens: int, initial: int, factor: int) -> None:
    capacity = rule.capacity(tokens, 4096)
    powers = [initial * factor**k for k in range(40)]
    assert capacity == min(power for power in powers if power >= tokens)


def test_five_rules_are_known_by_name() -> None:
    assert list(GROWTH_RULES.items()) == [
        ("static", Static),
        ("exact", Exact),
        ("doubling", Doubling),
        ("step", Step),
        ("hybrid", Hybrid),
    ]


def test_static_makes_room_for_the_longest_sequence_at_once() -> None:
    assert [Static().capacity(tokens, 4096) for tokens in (1, 200, 4096)] == [4096, 4096, 4096]


def test_exact_makes_room_for_what_there_is() -> None:
    assert [Exact().capacity(tokens, 4096) for tokens in (1, 200, 4096)] == [1, 200, 4096]


def test_doubling_jumps_behind_each_power_of_two() -> None:
    rule = Doubling(initial_tokens=64, growth_factor=2)
    tokens = (1, 64, 65, 128, 129, 256, 257, 2048, 2049)
    assert [rule.capacity(t, 4096) for t in tokens] == [64, 64, 128, 128, 256, 256, 512, 2048, 4096]


def test_doubling_does_not_know_the_longest_sequence() -> None:
    assert Doubling(initial_tokens=64, growth_factor=2).capacity(4500, 5000) == 8192


def test_the_first_buffer_and_the_factor_are_settings() -> None:
    rule = Doubling(initial_tokens=100, growth_factor=3)
    assert [rule.capacity(t, 4096) for t in (1, 100, 101, 300, 301)] == [100, 100, 300, 300, 900]


@given(tokens=st.integers(1, 10**6), initial=st.integers(1, 300), factor=st.integers(2, 5))
def test_doubling_is_the_smallest_power_that_holds_the_tokens(tokens: int, initial: int, factor: int) -> None:
    assert_smallest_power_that_holds(Doubling(initial, factor), tokens, initial, factor)


def test_a_boundary_that_is_one_token_off_is_noticed() -> None:
    @dataclass(frozen=True, slots=True)
    class JumpsOneTokenEarly(Doubling):
        def capacity(self, tokens: int, max_model_len: int, *, prompt_tokens: int = 0) -> int:
            return Doubling(self.initial_tokens, self.growth_factor).capacity(tokens + 1, max_model_len)

    assert_smallest_power_that_holds(JumpsOneTokenEarly(64, 2), 63, 64, 2)
    with pytest.raises(AssertionError):
        assert_smallest_power_that_holds(JumpsOneTokenEarly(64, 2), 64, 64, 2)


def test_step_adds_one_length_at_a_time() -> None:
    rule = Step(step_tokens=256)
    assert [rule.capacity(t, 4096) for t in (0, 1, 256, 257, 512, 513, 4096)] == [256, 256, 256, 512, 512, 768, 4096]


def test_step_does_not_know_the_longest_sequence() -> None:
    assert Step(step_tokens=300).capacity(4000, 4000) == 4200


@given(tokens=st.integers(1, 10**6), step=st.integers(1, 5000))
def test_step_is_the_smallest_multiple_that_holds_the_tokens(tokens: int, step: int) -> None:
    capacity = Step(step).capacity(tokens, 10**6)
    assert capacity % step == 0
    assert capacity - step < tokens <= capacity


def test_hybrid_gives_a_prompt_its_length_and_lets_decode_grow() -> None:
    rule = Hybrid(Doubling(initial_tokens=64, growth_factor=2))
    assert [rule.capacity(t, 4096, prompt_tokens=1000) for t in (1, 999, 1000)] == [1000, 1000, 1000]
    assert [rule.capacity(t, 4096, prompt_tokens=1000) for t in (1001, 1024, 1025)] == [1024, 1024, 2048]


def test_the_rule_of_decode_may_be_any_other() -> None:
    settings = {name: SETTINGS | {"decode_growth": name} for name in ("static", "exact", "step")}
    rules = {name: growth_rule("hybrid", settings[name]) for name in settings}
    assert rules == {"static": Hybrid(Static()), "exact": Hybrid(Exact()), "step": Hybrid(Step(256))}
    assert [rule.capacity(1001, 4096, prompt_tokens=1000) for rule in rules.values()] == [4096, 1001, 1024]


def test_only_growth_without_room_to_spare_concatenates() -> None:
    rules = [growth_rule(name, SETTINGS) for name in GROWTH_RULES]
    assert [rule.concatenates for rule in rules] == [False, True, False, False, False]
    assert Hybrid(Exact()).concatenates


def test_a_rule_takes_the_settings_that_bear_its_fields_names() -> None:
    assert growth_rule("doubling", SETTINGS) == Doubling(initial_tokens=64, growth_factor=2)
    assert growth_rule("static", SETTINGS) == Static()
    assert growth_rule("step", SETTINGS) == Step(step_tokens=256)
    assert growth_rule("hybrid", SETTINGS) == Hybrid(Doubling(initial_tokens=64, growth_factor=2))


def test_an_unknown_rule_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"no growth rule is called 'dobling' .*did you mean 'doubling'\?"):
        growth_rule("dobling", SETTINGS)


def test_an_unknown_rule_of_decode_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(ValueError, match=r"decode_growth must be one of .*, not 'stepp'; did you mean 'step'\?"):
        growth_rule("hybrid", SETTINGS | {"decode_growth": "stepp"})


def test_a_hybrid_of_hybrids_is_refused() -> None:
    with pytest.raises(ValueError, match="decode_growth must be one of static, exact, doubling, step, not 'hybrid'"):
        growth_rule("hybrid", SETTINGS | {"decode_growth": "hybrid"})


def test_settings_that_cannot_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="initial_tokens must be at least 1, not 0"):
        Doubling(initial_tokens=0, growth_factor=2)
    with pytest.raises(ValueError, match="growth_factor must be at least 2"):
        Doubling(initial_tokens=64, growth_factor=1)
    with pytest.raises(ValueError, match="step_tokens must be at least 1, not 0"):
        growth_rule("hybrid", SETTINGS | {"decode_growth": "step", "step_tokens": 0})
