"""Every paste gets its cause, its moment and its rank, in whatever wrapping; its books add up, in both languages."""

from __future__ import annotations

import re

import pytest

from hbmtwin.sim.explain import circumstances, memory_summary, npu_oom, smi, torch_oom
from hbmtwin.sim.explain.clean import clean
from hbmtwin.sim.explain.decode import decode
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.judge import Judgement, judge

from .memory_pastes import PASTES, Paste, Told

READERS = (torch_oom.read, npu_oom.read, smi.read, memory_summary.read, circumstances.read)


def findings_of(text: str) -> list[Finding]:
    lines = clean(decode(text))
    found = [finding for read in READERS for finding in read(lines)]
    return sorted(found, key=lambda finding: finding.line)


def judged(text: str) -> list[Judgement]:
    return judge(findings_of(text))


def told(text: str) -> tuple[Told, ...]:
    return tuple(Told(j.cause, j.when, j.phase, j.rank) for j in judged(text))


def test_there_are_enough_of_them() -> None:
    assert len(PASTES) >= 25
    assert len({paste.name for paste in PASTES}) == len(PASTES)


@pytest.mark.parametrize("paste", PASTES, ids=lambda paste: paste.name)
def test_what_a_paste_tells(paste: Paste) -> None:
    assert told(paste.text) == paste.told


@pytest.mark.parametrize("paste", PASTES, ids=lambda paste: paste.name)
def test_time_stamps_in_front_change_nothing(paste: Paste) -> None:
    stamped = "\n".join(f"2026-11-30T05:{at:02}:12.345Z {row}" for at, row in enumerate(paste.text.split("\n")))
    assert [item.cause for item in told(stamped)] == [item.cause for item in paste.told]


@pytest.mark.parametrize("width", [40, 61, 80])
@pytest.mark.parametrize("paste", [p for p in PASTES if "\n" not in p.text], ids=lambda paste: paste.name)
def test_a_terminal_may_break_it_anywhere(paste: Paste, width: int) -> None:
    rows = [paste.text[at : at + width] for at in range(0, len(paste.text), width)]
    assert [item.cause for item in told("\n".join(rows))] == [item.cause for item in paste.told]


@pytest.mark.parametrize("paste", PASTES, ids=lambda paste: paste.name)
def test_a_paste_cut_off_anywhere_is_never_an_error_and_never_another_cause(paste: Paste) -> None:
    """A shorter text tells less: it may leave the cause open, and it may not name a wrong one."""
    whole = {item.cause for item in paste.told}
    for end in range(0, len(paste.text), 7):
        for judgement in judged(paste.text[:end]):
            assert judgement.cause in whole | {None}, paste.text[:end]


@pytest.mark.parametrize("paste", PASTES, ids=lambda paste: paste.name)
def test_both_languages_say_the_same_numbers(paste: Paste) -> None:
    for judgement in judged(paste.text):
        said = (judgement.said, *judgement.arithmetic, *judgement.helps, *judgement.does_not_help)
        assert judgement.helps, "there is always something to do"
        for each in said:
            english, chinese = each.text("en"), each.text("zh")
            assert re.search("[一-鿿]", chinese), chinese
            assert not re.search("[一-鿿]", english), english
            sizes = r"[\d.]+ (?:bytes|KiB|MiB|GiB)"
            assert sorted(re.findall(sizes, english)) == sorted(re.findall(sizes, chinese))


def test_what_is_not_told_is_0_in_the_facts() -> None:
    (judgement,) = judged("NPU out of memory. Tried to allocate 514.00 MiB (NPU 0; 29.50 GiB total cap")
    assert judgement.cause is None
    facts = judgement.facts
    assert (facts.asked_bytes, facts.capacity_bytes, facts.driver_free_bytes) == (514 << 20, 0, 0)
    assert (facts.reserved_bytes, facts.tenants_bytes, facts.largest_free_bytes) == (0, 0, 0)


def test_ranks_fail_for_their_own_reasons() -> None:
    one = "(NPU 0; 60.96 GiB total capacity; 57.00 GiB already allocated; 57.00 GiB current active; 1.20 GiB free; "
    text = "\n".join(
        f"[rank{rank}]: NPU out of memory. Tried to allocate {asked} {one}57.31 GiB reserved in total by PyTorch)"
        for rank, asked in ((0, "3.01 GiB"), (1, "90.00 GiB"))
    )
    assert [(j.rank, j.cause.value if j.cause else "") for j in judged(text)] == [
        ("rank 0", "shortage"),
        ("rank 1", "never_fits"),
    ]
