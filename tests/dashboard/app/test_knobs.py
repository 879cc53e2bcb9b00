"""A knob that is turned, as its browser says it."""

from __future__ import annotations

import pytest

from hbmtwin.dashboard.app import knobs

PRESET, OTHER = "workload.preset", "seed=3"


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("built-in chat traffic", (OTHER,)),
        ("内置对话流量", (OTHER,)),
        (None, (OTHER,)),
        ("sharegpt", (OTHER, "workload.preset=sharegpt")),
    ],
)
def test_no_value_is_none_in_whichever_language_it_is_said(
    said: str | None, kept: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"widget": said, knobs.SETTINGS: (OTHER, f"{PRESET}=rag")}
    monkeypatch.setattr(knobs.st, "session_state", state)
    knobs._turned(PRESET, "widget")
    assert state[knobs.SETTINGS] == kept
    assert state["widget"] in (None, "sharegpt")
