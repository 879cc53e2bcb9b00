"""The table of pastes is a harness: each of these wrong judges and readers has to fall through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from hbmtwin.sim.explain import circumstances, failure, judge, npu_oom, printed, torch_oom
from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import Passage, Printed

from .memory_pastes import PASTES
from .test_judge_pastes import told


def wrong() -> list[str]:
    """The pastes that are not judged as the table says."""
    return [paste.name for paste in PASTES if told(paste.text) != paste.told]


def test_nothing_is_wrong() -> None:
    assert wrong() == []


def test_a_judge_that_ignores_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Printed, "__new__", lambda cls, value, give=0: _exact(cls, value))
    assert "npu_rounded" in wrong()


def _exact(cls: type[Printed], value: int) -> Printed:
    size = int.__new__(cls, value)
    size.give = 0
    return size


def test_units_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    def decimal(digits: str, unit: str) -> Printed:
        return Printed(round(float(digits) * 1000 ** ("bytes", "KiB", "MiB", "GiB").index(unit)))

    monkeypatch.setattr(Printed, "of", decimal)
    assert wrong()


def test_everything_outside_of_torch_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "OWN_MOST_BYTES", {"NPU": 0, "CUDA": 0})
    assert {"step", "two_ranks"} & set(wrong())


def test_others_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_tenants", lambda *_: ((), False, None))
    assert set(wrong()) == {"torch_tenant", "npu_tenant", "npu_smi"}


def test_cached_of_torch_1_2_taken_for_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(torch_oom._SIZE_THEN_WORDS)
    fields |= {
        "reserved_bytes": r"(?:reservedintotalbyPyTorch|cached\))",
        "unallocated_bytes": "isreservedbyPyTorchbut",
    }
    monkeypatch.setattr(torch_oom, "_SIZE_THEN_WORDS", tuple(fields.items()))
    assert wrong() == ["old_torch"]


def test_ranks_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = printed.passages

    def one_rank(lines: Sequence[Line], begin: object) -> Iterator[Passage]:
        return real([line._replace(rank="") for line in lines], begin)  # the rank is lost, and lines in turn are mixed

    monkeypatch.setattr(npu_oom, "passages", one_rank)
    assert "two_ranks" in wrong()


def test_a_message_read_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = printed.passages

    def each_line(lines: Sequence[Line], begin: object) -> Iterator[Passage]:
        for line in lines:
            yield from real([line], begin)

    monkeypatch.setattr(npu_oom, "passages", each_line)
    assert {"npu_from_26", "two_ranks"} <= set(wrong())


def test_the_outermost_frame_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(found: list[Finding], open_moments: dict[str, int], moment: Finding) -> None:
        if moment.rank not in open_moments:
            open_moments[moment.rank] = len(found)
            found.append(moment)

    monkeypatch.setattr(circumstances, "_keep", first)
    assert "capture" in wrong()


def test_a_failure_told_twice_judged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = judge.KINDS
    monkeypatch.setattr(judge, "_failures", lambda findings: [f for f in findings if f.kind in everything])
    assert {"capture", "npu_workspace"} <= set(wrong())


def test_a_rule_claimed_of_a_message_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was cut off is a memory fraction: without it more is free than was asked."""
    text = next(paste.text for paste in PASTES if paste.name == "torch_cap")
    cut = text[: text.index(" and 54.99 MiB")]
    (before,) = told(cut)
    assert before.cause is None
    causes = failure._causes

    def claims(finding: Finding, facts: object, asked: object, limit: object, left: object, *rest: object) -> object:
        return causes(finding, facts, asked, limit, finding.numbers.get("free_bytes"), *rest)

    monkeypatch.setattr(failure, "_causes", claims)
    monkeypatch.setattr(failure, "_largest", lambda asked, left: 1 << 40)
    assert "torch_cap" in wrong()
