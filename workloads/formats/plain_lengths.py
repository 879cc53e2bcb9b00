"""Formats that are two lengths, with a time in some files and without one in others.

::

    vidur      num_prefill_tokens  num_decode_tokens   arrived_at (s)      its lengths were filtered to a sum of 4,096
    lengths    input_tokens        output_tokens       arrival_s           samples of ShareGPT, counted by a tokenizer
    served     input_toks          output_toks         arrival_time (s)    a benchmark's log of what it sent
    custom     prompt_tokens       output_tokens       none                vLLM's ``--dataset-name custom``, see below

A line of vLLM's custom data set is ``{"prompt": TEXT, "output_tokens": 10}``: how long its prompt is depends on a
tokenizer, so it can be read only where ``prompt_tokens`` was added. A file without times gives lengths, no traffic.
Sources: github.com/microsoft/vidur (Agrawal et al., MLSys 2024; MIT); LLMServingSim 2 (KAIST CASYS; MIT); vLLM's
benchmarks (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, whole


def _format(name: str, title: str, prompt: str, output: str, time: str, *, ignored: tuple[str, ...]) -> Format:
    def parser(at: Columns, settings: Settings) -> Parse:
        prompt_at, output_at, time_at = at[prompt], at[output], at.get(time)

        def parse(line: int, values: Sequence[Any]) -> Row:
            time_ns = 0 if time_at is None else moment(time, values[time_at])
            prompt_tokens = whole(prompt, values[prompt_at], 1)
            return Row(line, time_ns, prompt_tokens, whole(output, values[output_at], 1))

        return parse

    return Format(name, title, (prompt, output), time, parser, optional=(time, *ignored))


VIDUR = _format(
    "vidur",
    "a Vidur file",
    "num_prefill_tokens",
    "num_decode_tokens",
    "arrived_at",
    ignored=("num_total_tokens", "pd_ratio"),
)
LENGTHS = _format(
    "lengths", "a ShareGPT-style file of lengths", "input_tokens", "output_tokens", "arrival_s", ignored=()
)
SERVED = _format(
    "served",
    "a benchmark's log of requests",
    "input_toks",
    "output_toks",
    "arrival_time",
    ignored=("request_id", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"),
)


def _custom(at: Columns, settings: Settings) -> Parse:
    output, prompt = at["output_tokens"], at.get("prompt_tokens")

    def parse(line: int, values: Sequence[Any]) -> Row:
        if prompt is None or values[prompt] is None:
            raise BadRow(
                "a prompt of text without prompt_tokens",
                "how many tokens a text has depends on a tokenizer, which hbmtwin does not have; count them with the "
                "model's own, and add prompt_tokens",
            )
        prompt_tokens = whole("prompt_tokens", values[prompt], 1)
        return Row(line, 0, prompt_tokens, whole("output_tokens", values[output], 1))

    return parse


CUSTOM = Format(
    name="custom",
    title="a custom data set of vLLM",
    required=("prompt", "output_tokens"),
    optional=("prompt_tokens",),
    time="arrival_s",
    parser=_custom,
)
