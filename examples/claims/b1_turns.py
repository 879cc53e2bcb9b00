"""B1's conversation turn by turn: contexts, and what a token costs with either attention, simulated and measured."""

from __future__ import annotations

import json
from functools import cache

import pandas as pd
from claim import HERE, simulate

from hbmtwin import Scenario
from hbmtwin.kernels.records import BatchShape
from hbmtwin.sim.run import Twin

KINDS = ("standard", "flash")
TURNS, NEW, ANSWER = 10, 40, 225
"""Of a conversation, and the means of 30 to 50 tokens in and 150 to 300 out."""
HEADS = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 128}
"""Of one rank of the 70B, of four."""
CPU_FILE = "b1_cpu.json"


def contexts() -> list[int]:
    """Tokens that attention reads in the middle of each turn's answer."""
    return [turn * (NEW + ANSWER) + NEW + ANSWER // 2 for turn in range(TURNS)]


@cache
def alone(kind: str) -> pd.Series[float]:
    """Milliseconds per output token of a single user, by turn from 1 on: the median over conversations."""
    requests = simulate("B1", f"engine.attention={kind}").requests
    per_token = (requests["end_ns"] - requests["first_token_ns"]) / (requests["output_tokens"] - 1) / 1e6
    return per_token.groupby(requests["turn"] + 1).median()


@cache
def _twin(kind: str) -> Twin:
    return Twin(Scenario.load(HERE / "b1.toml", overrides=[f"engine.attention={kind}"]))


def together(kind: str, users: int) -> list[float]:
    """Milliseconds of a step in which so many users decode, all in the same turn."""
    cost = _twin(kind).cost
    return [cost.steps(BatchShape((), users, users * n, users)).first_ns / 1e6 for n in contexts()]


def most_users() -> int:
    """Who fit, each with room for 4,096 tokens."""
    twin = _twin("flash")
    return int(twin.kv_budget_bytes // (twin.max_model_len * twin.token_bytes))


def users_for(ratio: float) -> int | None:
    """The fewest users with whom turn 10 costs *ratio* times as much with standard attention; None: not with any that
    fit."""
    for users in range(1, most_users() + 1):
        if together("standard", users)[-1] >= ratio * together("flash", users)[-1]:
            return users
    return None


def measured() -> dict[str, list[float]]:
    """Microseconds of one layer's attention on a CPU, by turn; ``b1_measure.py`` makes the file."""
    us: dict[str, list[float]] = json.loads((HERE / CPU_FILE).read_text(encoding="utf-8"))["us"]
    return us


def machine() -> str:
    """Where that was measured."""
    return str(json.loads((HERE / CPU_FILE).read_text(encoding="utf-8"))["machine"])
