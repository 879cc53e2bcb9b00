"""Qwen-Bailian's JSON lines: chats with their parents, and ids of 16 tokens.

::

    {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 8,
     "type": "text", "turn": 2, "hash_ids": [7, 8, 9]}

``timestamp`` is in seconds, ``parent_chat_id`` -1 for a first turn. A chat goes on with its parent's session if it is
the parent's first child; a further child, and one whose parent is not in the file, begins a session of its own. The
prompt is what the ids say: thinking tokens are stripped between turns, so it may be shorter than the parent's prompt
and answer, and the parent's last, partial block need not come back. Kept is one entry for each chat that may yet have a
child, which is each without one.
Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.hashed_prompts import prompt_spans
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, shown, whole

BAILIAN_BLOCK_SIZE: Final = 16
"""Tokens that an id of these traces stands for."""
_STREAM = "bailian"


def _parser(at: Columns, settings: Settings) -> Parse:
    chat, parent, time, prompt, output, ids = (at[name] for name in BAILIAN.required)
    block_size = settings.block_size or BAILIAN_BLOCK_SIZE
    session_of: dict[int, int] = {}

    def parse(line: int, values: Sequence[Any]) -> Row:
        chat_id, before = values[chat], values[parent]
        for name, value, least in (("chat_id", chat_id, 0), ("parent_chat_id", before, -1)):
            if type(value) is not int or not least <= value < 2**53:
                raise BadRow(f"{name} is {shown(value)}", f"it must be a whole number from {least}")
        time_ns = moment("timestamp", values[time])
        prompt_tokens = whole("input_length", values[prompt], 1)
        output_tokens = whole("output_length", values[output], 1)
        spans = prompt_spans(_STREAM, values[ids], prompt_tokens, block_size)
        session = session_of.pop(before, chat_id)
        session_of[chat_id] = session
        return Row(line, time_ns, prompt_tokens, output_tokens, session, None, spans)

    return parse


BAILIAN = Format(
    name="bailian",
    title="a Qwen-Bailian trace",
    required=("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"),
    optional=("type", "turn"),
    time="timestamp",
    parser=_parser,
    block_size=BAILIAN_BLOCK_SIZE,
)
