"""Calls of agents: ``session,call,t_s,input_chars,output_chars,shared_prefix_chars``.

::

    call 1   A A A A A A                 a stream of its own
    call 2   A A A A A A B B             shares 6 of 8 with call 1
    call 3   A A A A C C C               shares 4: whose call it was is not said; the latest that is long enough

Lengths are in characters: a token is taken for 4 of them, as is usual for English and code. The shared prefix is the
longest with any of up to 8 earlier calls of the session. Each session's times begin at 0, and when it began is not in
the file: sessions stand one after another here. ``time_scale`` and clients are for whoever wants them denser.
Source: github.com/LMCache/lmcache-agent-trace (Apache-2.0), lengths derived from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from hbmtwin.workloads.formats.format import Columns, Format, Parse, Settings
from hbmtwin.workloads.formats.rows import BadRow, Row, moment, whole
from hbmtwin.workloads.records import Span, merge_spans

CHARS_PER_TOKEN: Final = 4
_EARLIER_CALLS = 8


def tokens_of(chars: int) -> int:
    """Tokens of so many characters, at least 1."""
    return max(1, round(chars / CHARS_PER_TOKEN))


def _parser(at: Columns, settings: Settings) -> Parse:
    session, call, time, prompt, output, shared = (at[name] for name in AGENTS.required)
    earlier: deque[tuple[Span, ...]] = deque(maxlen=_EARLIER_CALLS)
    current, begin_ns, last_call, last_ns = -1, 0, 0, 0

    def parse(line: int, values: Sequence[Any]) -> Row:
        nonlocal current, begin_ns, last_call, last_ns
        of_session, number = whole("session", values[session], 0), whole("call", values[call], 0)
        since_ns = moment("t_s", values[time])
        prompt_tokens = tokens_of(whole("input_chars", values[prompt], 0))
        output_tokens = tokens_of(whole("output_chars", values[output], 0))
        common = whole("shared_prefix_chars", values[shared], 0)
        if common > int(values[prompt]):
            raise BadRow(f"shared_prefix_chars is {common}", "it must be at most input_chars")
        if of_session != current:
            if of_session < current:
                raise BadRow(f"session {of_session} follows session {current}", "sort the file by session, then by t_s")
            earlier.clear()
            current, begin_ns, last_call = of_session, last_ns, -1
        if number <= last_call:
            raise BadRow(f"call {number} follows call {last_call}", "the calls of a session must rise")
        spans = _prompt(earlier, f"agent/{of_session}/{number}", prompt_tokens, common // CHARS_PER_TOKEN)
        earlier.append(spans)
        last_call, last_ns = number, max(last_ns, begin_ns + since_ns)
        return Row(line, begin_ns + since_ns, prompt_tokens, output_tokens, of_session, None, spans)

    return parse


def _prompt(earlier: deque[tuple[Span, ...]], own: str, tokens: int, shared: int) -> tuple[Span, ...]:
    for spans in reversed(earlier):
        if sum(length for _, _, length in spans) >= shared:
            head = cut(spans, min(shared, tokens))
            return merge_spans((*head, (own, 0, tokens - min(shared, tokens))))
    return ((own, 0, tokens),)


def cut(spans: tuple[Span, ...], tokens: int) -> tuple[Span, ...]:
    """The first *tokens* tokens of a prompt."""
    head: list[Span] = []
    for stream, start, length in spans:
        if tokens <= 0:
            break
        head.append((stream, start, min(length, tokens)))
        tokens -= length
    return tuple(head)


AGENTS = Format(
    name="agents",
    title="a file of agents' calls",
    required=("session", "call", "t_s", "input_chars", "output_chars", "shared_prefix_chars"),
    time="t_s",
    parser=_parser,
    note="lengths are characters / 4, and sessions follow one another: the file does not say when each began",
)
