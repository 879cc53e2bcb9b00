"""Loads that grow: which key of a scenario is raised, and through which values.

::

    users=10:200:10             10, 20, ... 200          workload.users, a closed loop
    users=10:50:x1.5            10, 15, 22, 34           rounded to whole numbers
    request_rate=0.5:8:x1.25    0.5, 0.625, 0.78125 ...  workload.request_rate, sessions a second
    rate_scale=0.1,0.2,0.5      as written               a trace or a model, so many times as dense as it is
    num_prompts=8:64:8          8, 16, ... 64            workload.num_prompts, for those that start together
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.workloads.suggest import did_you_mean

WORDS = {
    "users": Phrase("users", "用户数"),
    "request_rate": Phrase("sessions a second", "每秒会话数"),
    "rate_scale": Phrase("times the recorded rate", "录制速率的倍数"),
    "num_prompts": Phrase("requests", "请求数"),
}
"""What may grow, as an axis has it."""
COUNTED = {
    "users": Phrase("{value} users", "{value} 个用户"),
    "request_rate": Phrase("{value} sessions a second", "每秒 {value} 个会话"),
    "rate_scale": Phrase("{value} times the recorded rate", "录制速率的 {value} 倍"),
    "num_prompts": Phrase("{value} requests", "{value} 条请求"),
}
"""How a value of it is read."""
WHOLE = ("users", "num_prompts")
"""Those that are whole numbers."""
MAX_VALUES = 1000
FORM = "write it as users=10:200:10 (or :x1.5 for steps by a factor, or users=10,20,50)"
LEAST, MOST = 1e-9, 1e9
"""Of a load: as in a scenario, where a trace's clock may not run slower or faster either."""
DIGITS = 12
"""Significant digits of a value: those of its file name and axis, free of what adding floats leaves behind."""


class Load(NamedTuple):
    """What grows, and its values from the smallest to the largest."""

    word: str
    values: tuple[float, ...]

    def keys(self, scenario: Scenario, value: float) -> dict[str, Any]:
        """The dotted keys that bring *scenario* to this load."""
        if self.word == "rate_scale" and scenario.workload.trace is not None:
            return {"workload.time_scale": 1 / value}
        return {f"workload.{self.word}": value}

    def text(self, value: float, lang: Lang = "en") -> str:
        """``20 users``."""
        number = f"{value:,.4g}" if self.word not in WHOLE else f"{value:,}"
        if lang == "en" and value == 1 and self.word in WHOLE:
            return f"1 {WORDS[self.word].en.removesuffix('s')}"
        return Said.of(COUNTED[self.word], value=number).text(lang)


def parse_load(text: str) -> Load:
    """Read a load as the module's head shows it. Raise ScenarioError."""
    name, equals, values = text.partition("=")
    word = name.strip().removeprefix("workload.")
    if not equals:
        raise ScenarioError(f"--load {text}: {FORM}")
    if word == "time_scale":
        raise ScenarioError(
            f"--load {text}: a trace gets denser as time_scale falls; write rate_scale, which is 1 / time_scale"
        )
    if word not in WORDS:
        raise ScenarioError(f"--load {text}: {name.strip()!r} is no load; {did_you_mean(word, WORDS)}")
    found = _range(text, values) if ":" in values else [_number(text, part) for part in values.split(",")]
    rounded = [float(f"{value:.{DIGITS}g}") for value in found]
    if word in WHOLE:
        if ":x" in values.replace(" ", ""):  # steps by a factor seldom hit whole numbers
            rounded = [float(round(value)) for value in rounded]
        if broken := [value for value in rounded if not value.is_integer()]:
            raise ScenarioError(f"--load {text}: {word} are whole numbers, and {broken[0]:.12g} is none; {FORM}")
        rounded = [int(value) for value in rounded]
    return Load(word, tuple(sorted(set(rounded))))


def check_load(scenario: Scenario, load: Load) -> None:
    """Raise ScenarioError for a load that a scenario's traffic does not have."""
    w = scenario.workload
    recorded = "trace" if w.trace is not None else "model" if w.model is not None else None
    if recorded is None and load.word == "rate_scale":
        other = "users" if w.users is not None else "request_rate"
        raise ScenarioError(f"--load rate_scale: concerns a trace or a model; here the load is {other}")
    if recorded is not None and load.word != "rate_scale":
        raise ScenarioError(f"--load {load.word}: workload.{recorded} says who asks when; here the load is rate_scale")
    if load.word == "request_rate" and w.users is not None:
        raise ScenarioError("--load request_rate: workload.users makes a closed loop; here the load is users")
    if load.word == "users" and w.request_rate is not None:
        raise ScenarioError("--load users: workload.request_rate makes an open loop; here the load is request_rate")


def default_load(scenario: Scenario) -> Load:
    """A load for who names none: from an eighth of the scenario's own to 8 times it, by steps of about a fifth.

    That is its users in a closed loop, the rate of a trace or a model, else sessions a second (1 where the scenario
    has none of its own, or all at once: requests then).
    """
    w = scenario.workload
    if w.users is not None:
        return Load("users", tuple(sorted({max(1, round(w.users * factor)) for factor in _FACTORS})))
    if w.trace is not None:
        return Load("rate_scale", tuple(_short(factor / w.time_scale) for factor in _FACTORS))
    if w.model is not None:
        return Load("rate_scale", tuple(_short(factor * w.rate_scale) for factor in _FACTORS))
    rate = 1.0 if w.request_rate is None else w.request_rate
    if math.isinf(rate):
        requests = 64 if w.num_prompts is None else w.num_prompts
        return Load("num_prompts", tuple(sorted({max(1, round(requests * factor)) for factor in _FACTORS})))
    return Load("request_rate", tuple(_short(factor * rate) for factor in _FACTORS))


_FACTORS = tuple(2 ** (power / 4) for power in range(-12, 13))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _range(text: str, values: str) -> list[float]:
    parts = values.split(":")
    if len(parts) != 3:
        raise ScenarioError(f"--load {text}: {FORM}")
    first, last = _number(text, parts[0]), _number(text, parts[1])
    step = parts[2].strip()
    if last < first:
        raise ScenarioError(f"--load {text}: it ends below where it begins; write the smaller load first")
    if step.startswith("x"):
        factor = _number(text, step[1:])
        if factor <= 1:
            raise ScenarioError(f"--load {text}: a load that grows takes a factor above 1, not x{factor:g}")
        count = math.floor(math.log(last / first) / math.log(factor) + 1e-9) + 1
        return [first * factor**i for i in range(_checked(text, count))]
    width = _number(text, step)
    count = math.floor((last - first) / width + 1e-9) + 1
    return [first + width * i for i in range(_checked(text, count))]


def _checked(text: str, count: int) -> int:
    if count > MAX_VALUES:
        raise ScenarioError(f"--load {text}: {count:,} values; at most {MAX_VALUES:,}: take larger steps")
    return count


def _number(text: str, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise ScenarioError(f"--load {text}: {part.strip()!r} is no number; {FORM}") from None
    if not LEAST <= value <= MOST:  # nan neither
        raise ScenarioError(
            f"--load {text}: loads and steps are above 0, at least {LEAST:g} and at most {MOST:g}, not {part.strip()}"
        )
    return value
