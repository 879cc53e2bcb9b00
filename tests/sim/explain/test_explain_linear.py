"""Work grows with the text and not with its square, whatever the text: steps are counted, not seconds."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from hbmtwin.sim.explain.explaining import explain

from .engine_pastes import HEALTHY, PASTES

UNITS = {
    "single characters on lines": "a\n",
    "digits": "1",
    "commas and digits": "1,",
    "brackets": "[(",
    "escapes": "\x1b[",
    "broken colours": "[1;",
    "one prefix for ever": "(Worker_TP0 pid=1) ",
    "prefixes and nothing": "(Worker_TP0 pid=1) INFO 11-30 05:12:33 [gpu_worker.py:298] \n",
    "carriage returns": "a\r",
    "JSON lines": '{"log":"x"}\n',
    "deep JSON": '{"a":' * 200 + "}" * 200 + "\n",
    "blanks": " ",
    "quotes": "'\"",
    "first words without numbers": "Available KV cache memory: ",
    "a message that begins again and again": "Free memory on device (1.5/2.0 GiB) on startup. Desired GPU memory "
    "utilization is (0.9, 1.8 GiB). Actual usage: 1.0 GiB for weights, ",
    "arguments that never end": "non-default args: {'model': 'a', ",
    "a key that never ends": "'model':'",
    "commands": "vllm serve \\\n",
    "errors": "ValueError: x\n",
    "tracebacks": 'Traceback (most recent call last)\n  File "a.py", line 1, in load_model\n',
    "many ranks": "".join(f"(Worker_TP{rank} pid={rank}) hello\n" for rank in range(50)),
    "allocator's first words": "Tried to allocate ",
    "processes": "Process 1 has 1.00 GiB memory in use. ",
    "tables": "| 0  910B3 | OK | 1 1 0 / 0 |\n",
    "a boot log": HEALTHY[0].text,
    "an error": PASTES[0].text,
}


def lines_run(text: str) -> int:
    """How many lines of Python are executed."""
    count = 0

    def step(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += 1
        return step

    sys.settrace(step)
    try:
        explain(text)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_four_times_the_text_is_at_most_four_times_the_lines_of_code(unit: str) -> None:
    """What runs within one line of code is bounded: every pattern is, and every search is for plain words."""
    size = 6_000
    once, four = ((unit * (size * times // len(unit) + 1))[: size * times] for times in (1, 4))
    explain(once)  # what is imported and cached on first use is not counted
    few, many = lines_run(once), lines_run(four)
    assert many <= 4.4 * few + 3_000
