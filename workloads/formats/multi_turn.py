"""Traffic of vLLM's multi-turn benchmark (``benchmark_serving_multi_turn.py``), from the JSON that it reads.

::

    num_conversations: 24                 conversation 0 1 2 3 4 5 6 ...   dealt out to --num-clients in turn
    prompt_input:                         client       0 1 2 0 1 2 0 ...
        num_turns                         messages of both sides: 12..18 are 6, 7, 7, 8, 8, 9, 9 requests
        common_prefix_num_tokens          drawn once; before the first message of every conversation
        prefix_num_tokens                 of the conversation's own, behind it
        num_tokens                        of each message of the user
    prompt_output:
        num_tokens                        of each answer

    first prompt = common prefix + own prefix + what num_tokens has beyond the common prefix

A client has one conversation at a time and sends each request when the answer before it has come; with a rate it waits
before that, exponentially with mean 1 / rate. The benchmark hands the next conversation to whoever is free, stops all
clients when one has no more, and writes a line of words before each text; here they are dealt out in turn, so that the
traffic is the same under every policy, all are served (``--no-early-stop``), and tokens are as the JSON says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hbmtwin.workloads import draws
from hbmtwin.workloads.conversations import SYSTEM_STREAM
from hbmtwin.workloads.draws import Purpose
from hbmtwin.workloads.formats.lines import text_lines
from hbmtwin.workloads.formats.multi_turn_counts import Count, UniformCount, count_from
from hbmtwin.workloads.plural import counted
from hbmtwin.workloads.records import Request, Span, Status, WorkloadError, merge_spans, output_stream, user_stream
from hbmtwin.workloads.suggest import did_you_mean
from hbmtwin.workloads.think_times import ExponentialTime

MOST_CONVERSATIONS = 10**6
_KNOWN = ("filetype", "num_conversations", "text_files", "print_stats", "prompt_input", "prompt_output")
_INPUT = ("num_turns", "common_prefix_num_tokens", "prefix_num_tokens", "num_tokens")
_NOTHING = UniformCount(0, 0)


@dataclass(frozen=True, slots=True)
class MultiTurnPlan:
    """What the JSON says."""

    num_conversations: int
    num_turns: Count
    """Messages of a conversation, of both sides."""
    common_prefix: Count
    prefix: Count
    prompt_tokens: Count
    output_tokens: Count


def read_multi_turn(path: Path) -> MultiTurnPlan:
    """Read the benchmark's input file. Raise WorkloadError that names file, key and cure."""
    text = "".join(text_lines(path))
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise WorkloadError(f"{path}:{error.lineno}: not JSON ({error.msg}); check the file") from None
    if not isinstance(found, Mapping):
        raise WorkloadError(
            f"{path}: this is a list, perhaps of conversations, whose texts have no token counts; write the JSON with "
            "num_conversations, prompt_input and prompt_output"
        )
    try:
        return _plan(found)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from None


def _plan(found: Mapping[str, Any]) -> MultiTurnPlan:
    _check_keys(found, "", _KNOWN, ("num_conversations", "prompt_input", "prompt_output"))
    prompt, output, count = found["prompt_input"], found["prompt_output"], found["num_conversations"]
    for name, table in (("prompt_input", prompt), ("prompt_output", output)):
        if not isinstance(table, Mapping):
            raise WorkloadError(f"{name}: write a table, not {table!r}")
    _check_keys(prompt, "prompt_input.", _INPUT, ("num_turns", "prefix_num_tokens", "num_tokens"))
    _check_keys(output, "prompt_output.", ("num_tokens",), ("num_tokens",))
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_CONVERSATIONS:
        raise WorkloadError(f"num_conversations is a whole number from 1 to {MOST_CONVERSATIONS:,}, not {count!r}")
    common = prompt.get("common_prefix_num_tokens")
    return MultiTurnPlan(
        num_conversations=count,
        num_turns=count_from(prompt["num_turns"], "prompt_input.num_turns"),
        common_prefix=_NOTHING if common is None else count_from(common, "prompt_input.common_prefix_num_tokens"),
        prefix=count_from(prompt["prefix_num_tokens"], "prompt_input.prefix_num_tokens"),
        prompt_tokens=count_from(prompt["num_tokens"], "prompt_input.num_tokens"),
        output_tokens=count_from(output["num_tokens"], "prompt_output.num_tokens"),
    )


def _check_keys(table: Mapping[str, Any], where: str, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise WorkloadError(f"{where}{key}: unknown; {did_you_mean(str(key), known)}")
    for key in needed:
        if key not in table:
            raise WorkloadError(f"{where}{key} is missing")


class MultiTurn:
    """A :class:`~hbmtwin.workloads.records.Source` of *num_clients* that go through the conversations of a plan.

    ``max_num_requests`` is shared out, the same whole number to each client. When a turn is rejected or fails, its
    client gives the conversation up and opens its next. Keeps two numbers a conversation. Raise WorkloadError if there
    are more clients than conversations, or than requests.
    """

    def __init__(
        self,
        plan: MultiTurnPlan,
        *,
        seed: int = 0,
        num_clients: int = 1,
        max_num_requests: int | None = None,
        request_rate: float | None = None,
    ) -> None:
        if not 1 <= num_clients <= plan.num_conversations:
            raise WorkloadError(
                f"{num_clients} clients need as many conversations, and there are {plan.num_conversations}"
            )
        if max_num_requests is not None and max_num_requests < num_clients:
            raise WorkloadError(
                f"{counted(max_num_requests, 'request')} for {num_clients} clients: each of them begins with one"
            )
        self.plan = plan
        self.num_clients = num_clients
        self._seed = seed
        self._wait = None if request_rate is None else ExponentialTime(1 / request_rate)
        self._turns, self._first_ids, self.total_requests = self._share_out(max_num_requests)

    def _share_out(self, max_num_requests: int | None) -> tuple[list[int], list[int], int | None]:
        """Requests of each conversation, the id of its first one, and how many there are."""
        count = self.plan.num_conversations
        turns, first_ids, made = [0] * count, [0] * count, 0
        for client in range(self.num_clients):
            left = None if max_num_requests is None else max_num_requests // self.num_clients
            for conversation in range(client, count, self.num_clients):
                messages = self.plan.num_turns.at(self._uniform(Purpose.TURNS, conversation, 0))
                wanted = (max(messages, 2) + 1) // 2
                turns[conversation] = wanted if left is None else min(wanted, left)
                first_ids[conversation] = made
                made += turns[conversation]
                left = None if left is None else left - turns[conversation]
        return turns, first_ids, made

    def open(self) -> Iterator[Request]:
        """The first request of each client, all at time 0. O(1) each."""
        for client in range(self.num_clients):
            yield self._first_turn(client, 0)

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The next request of *r*'s client; None after its last conversation or request."""
        if status is Status.UNFINISHED:
            return None
        arrival_ns = end_ns + self._wait_ns(r)
        if status is Status.COMPLETED and r.has_next:
            history = (*r.spans, (output_stream(r.session, r.turn), 0, r.output_tokens))
            turn = r.turn + 1
            new = max(1, self.plan.prompt_tokens.at(self._uniform(Purpose.PROMPT_TOKENS, r.session, turn)))
            return self._request(r.session, turn, arrival_ns, history, r.prompt_tokens + r.output_tokens, new)
        following = r.session + self.num_clients
        if following >= self.plan.num_conversations or not self._turns[following]:
            return None
        return self._first_turn(following, arrival_ns)

    def _first_turn(self, conversation: int, arrival_ns: int) -> Request:
        common = self._common_prefix
        said = self.plan.prompt_tokens.at(self._uniform(Purpose.PROMPT_TOKENS, conversation, 0))
        own = self.plan.prefix.at(self._uniform(Purpose.SESSION_PREFIX, conversation, 0))
        new = max(1, own + max(0, said - common))
        return self._request(conversation, 0, arrival_ns, merge_spans(((SYSTEM_STREAM, 0, common),)), common, new)

    def _request(
        self, session: int, turn: int, arrival_ns: int, history: tuple[Span, ...], history_tokens: int, new: int
    ) -> Request:
        output = max(1, self.plan.output_tokens.at(self._uniform(Purpose.OUTPUT_TOKENS, session, turn)))
        return Request(
            id=self._first_ids[session] + turn,
            session=session,
            turn=turn,
            arrival_ns=arrival_ns,
            prompt_tokens=history_tokens + new,
            output_tokens=output,
            max_tokens=output,
            spans=(*history, (user_stream(session, turn), 0, new)),
            has_next=turn + 1 < self._turns[session],
        )

    def _wait_ns(self, r: Request) -> int:
        return 0 if self._wait is None else self._wait.at(self._uniform(Purpose.THINK_TIME, r.session, r.turn))

    @cached_property
    def _common_prefix(self) -> int:
        return self.plan.common_prefix.at(self._uniform(Purpose.COMMON_PREFIX, 0, 0))

    def _uniform(self, purpose: Purpose, session: int, turn: int) -> float:
        return draws.uniform(self._seed, purpose, session, turn)
