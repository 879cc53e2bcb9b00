"""A scenario file with every key, its default, and what it means: what ``hbmtwin init`` writes.

All of it is read from the records of the scenario and from the built-in workload, so that it cannot disagree with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hbmtwin.api import Scenario
from hbmtwin.workloads.builtin import (
    BURSTS,
    NUM_PROMPTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUEST_RATE,
    SYSTEM_PROMPT_TOKENS,
    THINK_TIME,
    TURNS,
)
from hbmtwin.workloads.lengths import Quantiles

_HEAD = """\
# An hbmtwin scenario. Every key is here with its default; keys without one are commented out.
# Bytes may be written with a unit ("29.5GiB"). `hbmtwin catalog` lists devices, models and policies.
# hbmtwin run FILE      hbmtwin compare FILE      hbmtwin run FILE --set workload.num_prompts=100
"""


def commented_scenario() -> str:
    """The text of the file. Reading it back gives the default scenario."""
    scenario = Scenario()
    lines = [_HEAD]
    sections: list[str] = []
    for name, info in Scenario.model_fields.items():
        value = getattr(scenario, name)
        if isinstance(value, BaseModel):
            sections += ["", f"[{name}]"]
            for key, inner in type(value).model_fields.items():
                sections += _entry(key, getattr(value, key), inner, _MORE.get(f"{name}.{key}", ()))
        else:
            lines += _entry(name, value, info)
    return "\n".join([*lines, *sections]) + "\n"


def _entry(key: str, value: Any, info: FieldInfo, more: Sequence[str] = ()) -> list[str]:
    comment = [f"# {line}" for line in (info.description, *more) if line]
    if value is None:
        return comment if any(line.startswith(f"{key} =") for line in more) else [*comment, f"# {key} ="]
    if value == {}:  # as a table of its own it would end the section
        return [*comment, f"{key} = {{}}"]
    return [*comment, tomli_w.dumps({key: value}).strip()]


def _quantiles(key: str, table: Quantiles) -> str:
    pairs = f"probabilities = {list(table.probabilities)}, values = {list(table.values)}"
    return f'{key} = {{ distribution = "quantiles", {pairs} }}'


_MORE: dict[str, tuple[str, ...]] = {
    "workload.preset": ('preset = "azure-conv"',),
    "workload.trace": ("none of trace, users and request_rate: the built-in traffic", 'trace = "requests.csv.gz"'),
    "workload.model": ('model = "model.toml"',),
    "workload.multi_turn": ('multi_turn = "generate_multi_turn.json"',),
    "workload.users": ("users = 32",),
    "workload.request_rate": (
        f"left out: {REQUEST_RATE:g} sessions a second, of each {BURSTS.every_s:g} s "
        f"{BURSTS.length_s:g} s at {BURSTS.factor:g} times that, the others at {BURSTS.calm_factor:.2g} times",
        "request_rate = 2.0",
    ),
    "workload.num_prompts": (f"left out: {NUM_PROMPTS}; of a trace: all", "num_prompts = 200"),
    "workload.prompt_tokens": (
        "a number, or a table; left out: the built-in quantiles, the last line here (docs/workloads.md has all forms)",
        "prompt_tokens = 512",
        'prompt_tokens = { distribution = "lognormal", mean = 1155, sigma = 0.9, max = 4096 }',
        _quantiles("prompt_tokens", PROMPT_TOKENS),
    ),
    "workload.output_tokens": (
        "as prompt_tokens; left out: the last line here",
        'output_tokens = { distribution = "uniform", low = 64, high = 256 }',
        _quantiles("output_tokens", OUTPUT_TOKENS),
    ),
    "workload.system_prompt_tokens": (
        f"left out: {SYSTEM_PROMPT_TOKENS}",
        "system_prompt_tokens = 0",
    ),
    "session.turns": (
        "as prompt_tokens; left out: the last line here",
        "turns = 1",
        _quantiles("turns", TURNS),
    ),
    "session.think_time_s": (
        "left out: the last line here",
        "think_time_s = 10.0",
        'think_time_s = { distribution = "exponential", mean = 20 }',
        f'think_time_s = {{ distribution = "lognormal", mean = {THINK_TIME.mean_s:g}, sigma = {THINK_TIME.sigma:g} }}',
    ),
}
"""What a key's description does not say: what happens without it, and lines to uncomment."""
