"""What a claim is, and how the experiments of this directory find their number.

Every experiment is a scenario file, whose head says what was claimed and what to look at, and a function that runs it
and answers with a :class:`Found`. ``python examples/claims`` runs them all. What docs/claims.md says of a claim are its
function's words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hbmtwin import Result, Scenario, run

HERE = Path(__file__).parent
GIB = 1 << 30
MIB = 1 << 20

Verdict = Literal["holds", "holds in part", "wrong"]


@dataclass(frozen=True)
class Found:
    """What the simulation says to one claim."""

    verdict: Verdict
    simulated: str
    """The number, with its unit."""
    why: str
    """Why claim and simulation differ, or on what the claim rests."""
    told: str = ""
    """A paragraph below the table: what to take from it. Whatever does not simply hold has one."""


@dataclass(frozen=True)
class Claim:
    """A statement of one of the write-ups, and the experiment that judges it."""

    id: str
    claimed: str
    find: Callable[[], Found]
    picture: str | None
    """What its picture shows, which is drawn by pictures.py and stands under the paragraph."""


CLAIMS: dict[str, Claim] = {}


def claim(id: str, claimed: str, *, picture: str | None = None) -> Callable[[Callable[[], Found]], Callable[[], Found]]:
    """Register the experiment of a claim."""

    def register(find: Callable[[], Found]) -> Callable[[], Found]:
        CLAIMS[id] = Claim(id, claimed, find, picture)
        return find

    return register


def order(id: str) -> tuple[str, int]:
    """By write-up and number: A2 before A10."""
    return id[0], int(id[1:])


def simulate(id: str, *overrides: str, preset: str | None = None) -> Result:
    """Run the scenario file of a claim, changed by ``--set`` like overrides."""
    return run(Scenario.load(HERE / f"{id.lower()}.toml", overrides=overrides, preset=preset))


def kv_bytes(result: Result) -> list[int]:
    """Bytes of live and parked tokens, row by row."""
    timeline = result.timeline
    return [int(size) for size in timeline["kv_tokens"] + timeline["kv_parked"]]
