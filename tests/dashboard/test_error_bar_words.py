"""What error bars say of runs of which not all have a number, or of which only the end differs."""

from __future__ import annotations

from hbmtwin.dashboard.error_bar_words import bar_rows, fate_sentence, most_sentence, order_sentences, sentences
from hbmtwin.sim.capacity.error_bars import MEASURES, Outcome, error_bars_to_dicts

from .chinese_of_error_bars import NO_START, bars, died, outcome

HELD = outcome(1, tpot_p99_s=0.03, e2e_p99_s=3)
NOTHING = Outcome("held", None, {**dict.fromkeys(MEASURES), "requests_completed": 0, "preemptions": 0})


def test_a_run_that_held_and_dies_at_one_end_has_an_early_end_that_is_no_constant() -> None:
    told = error_bars_to_dicts({"paged": bars(outcome(0.5), *[outcome(0.5)] * 3, died(12.5))})["paged"]
    rows = {row[0]: row[1:] for row in bar_rows(told, names=True)}
    at = "non_torch_bytes 200.00 MiB"
    assert rows["early end"] == ("12.50 s", "–", "12.50 s", at, at)
    assert rows["completed requests"] == ("10", "10", "10", "does not move", "")


def test_it_is_not_said_that_nothing_changes_where_a_run_ends_in_another_way() -> None:
    """Its numbers are alike: it had served all of them before it died, or has none where it does not start."""
    told = error_bars_to_dicts({"paged": bars(outcome(0.5), died(12.5), NO_START, died(12.5), outcome(0.5))})["paged"]
    assert most_sentence(told) == ""
    assert sentences(told, "paged")[1:] == [
        "paged: held, and so at 1 of 4 ends. Not so: the share of the bandwidth with which KV is read 31.0 %: died at "
        "12.5 s: growth copy; the share of the bandwidth with which KV is read 80.0 %: does not "
        "start; what libraries hold outside torch 0 B: died at 12.5 s: growth copy."
    ]
    still = error_bars_to_dicts({"paged": bars(HELD, *[HELD] * 4)})["paged"]
    assert most_sentence(still) == "No end changes any of these numbers."


def test_where_no_time_moves_it_tells_what_does() -> None:
    fewer = outcome(0.5, requests_completed=7)
    told = error_bars_to_dicts({"paged": bars(outcome(0.5), outcome(0.5), fewer, outcome(0.5), fewer)})["paged"]
    assert most_sentence(told) == (
        "What moves completed requests most is the share of the bandwidth with which KV is read: 7 to 10."
    )


def test_a_run_that_held_without_a_number_is_not_said_to_have_ended_early() -> None:
    dead = bars(died(5), *[died(5)] * 4)
    named = {"a": bars(HELD, *[HELD] * 4), "b": bars(HELD, *[HELD] * 4), "none": bars(NOTHING, *[NOTHING] * 4)}
    assert order_sentences(error_bars_to_dicts({**named, "dead": dead}))[1] == (
        "TTFT p99: a = b at all 4 ends; not among them: dead, which ended early; not among them: none, without such "
        "a number."
    )


def test_it_names_the_numbers_that_are_not_put_in_order() -> None:
    """Answers of one token have no TPOT: both runs went to their end all the same."""
    one_token = outcome(1, e2e_p99_s=1)
    told = error_bars_to_dicts({name: bars(one_token, *[one_token] * 4) for name in ("a", "b")})
    assert order_sentences(told) == [
        "completed requests: a = b at all 4 ends.",
        "TTFT p99: a = b at all 4 ends.",
        "end to end p99: a = b at all 4 ends.",
        "Not put in order, as fewer than two runs went to their end and have such a number: TPOT p99.",
    ]


def test_a_run_that_went_to_its_end_and_completed_nothing_is_not_said_to_have_held() -> None:
    told = error_bars_to_dicts({"none": bars(NOTHING, *[NOTHING] * 4)})["none"]
    assert fate_sentence(told, "none") == "none: served nothing, and so at all 4 ends."
    assert fate_sentence(told, "none", "zh") == "none：未处理任何请求，全部 4 种取值下均如此。"
