"""Paged prefix caching, one request at a time, beside the ideal cache: each term by hand, a naive model, Mooncake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.records import KVSequence, Release
from hbmtwin.sim import serial_reuse
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.serial_reuse import ReuseTerms, paged_hits, reuse_terms
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads import Conversations, Fixed, Request, Status, WorkloadError, output_stream
from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.formats.mooncake import mooncake_chains
from hbmtwin.workloads.formats.traces import open_trace
from hbmtwin.workloads.records import Span
from hbmtwin.workloads.statistics.reuse_curve import reuse_curve, reuse_hits

MOONCAKE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "mooncake_fast25_conversation.jsonl.gz"
needs_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not beside this checkout")
AMPLE = 1000


def requests(*prompts: tuple[Span, ...], output: int = 1) -> list[Request]:
    """One request of one turn for each prompt."""
    return [
        Request(
            id=number,
            session=number,
            turn=0,
            arrival_ns=0,
            prompt_tokens=sum(length for _, _, length in spans),
            output_tokens=output,
            max_tokens=output,
            spans=spans,
        )
        for number, spans in enumerate(prompts)
    ]


def said(word: str, tokens: int) -> tuple[Span, ...]:
    """A prompt of its own stream."""
    return ((word, 0, tokens),)


def terms(asked: Sequence[Request], capacity: int) -> dict[str, int]:
    """What is not 0 in blocks of 4 tokens, after ideal and paged."""
    (found,) = reuse_terms(asked, [capacity], 4)
    assert found.ideal + sum(found.terms.values()) == found.paged
    assert found.whole_blocks == found.ideal + found.partial_hits + found.partial_room
    return {"ideal": found.ideal, "paged": found.paged} | {name: n for name, n in found.terms.items() if n}


# Each term by hand, in blocks of 4


def test_where_memory_is_ample_whole_blocks_leave_no_difference() -> None:
    assert terms(requests(said("a", 9), said("a", 13), said("b", 5)), AMPLE) == {"ideal": 2, "paged": 2}


def test_a_partial_block_that_the_ideal_cache_hits_has_no_key() -> None:
    assert terms(requests(said("a", 6), said("a", 6)), AMPLE) == {"ideal": 2, "paged": 1, "partial_hits": -1}


def test_a_prompt_that_ends_with_a_block_computes_that_block_again() -> None:
    assert terms(requests(said("a", 8), said("a", 8)), AMPLE) == {"ideal": 2, "paged": 1, "last_token": -1}
    assert terms(requests(said("a", 8), said("a", 9)), AMPLE) == {"ideal": 2, "paged": 2}


def test_partial_blocks_take_room_in_the_ideal_cache_and_one_block_is_being_filled_in_paged() -> None:
    """Three blocks keep a0 b0 c0; the ideal cache keeps b0, c0 and c's partial one; paged two beside the one in use."""
    back = requests(said("a", 6), said("b", 6), said("c", 6), said("a", 6))
    assert terms(back, 3) == {"ideal": 0, "paged": 0, "partial_room": 1, "filling_block": -1}


def test_the_null_block_is_a_block_less() -> None:
    """Of three blocks one is not there and one in use: a0 or b0. In a pool of four both stay, as in the ideal cache."""
    back = requests(said("a", 6), said("b", 6), said("a", 5))
    assert terms(back, 3) == {"ideal": 1, "paged": 0, "null_block": -1}
    assert terms(back, 4) == {"ideal": 1, "paged": 1}


def test_answers_push_prefixes_out_and_later_turns_find_them() -> None:
    """6 tokens, and 6 computed ones of an answer, are three blocks, all that the pool has: b leaves nothing of a. In a
    session an answer is the next turn's history: 12 tokens of 14 are there, the ideal cache knows the prompt's 4."""
    back = requests(said("a", 6), said("b", 6), said("a", 5), output=7)
    assert terms(back, 4) == {"ideal": 1, "paged": 0, "generated_tokens": -1}
    history = (*said("a", 6), (output_stream(0, 0), 0, 7), *said("more", 1))
    turns = [*requests(said("a", 6), output=7), *requests((), history)[1:]]
    assert terms(turns, AMPLE) == {"ideal": 1, "paged": 3, "generated_tokens": 2}


# The ladder: with r turns of equal length, r - 1 of r parts were there before


def equal_turns(question: int) -> list[Request]:
    """Four turns of one session, each with an answer of one token."""
    session = Conversations(prompt_tokens=Fixed(question), output_tokens=Fixed(1), turns=Fixed(4))
    turns = [session.first_turn(0, id=0, arrival_ns=0, has_next=True)]
    while len(turns) < 4:
        turns.append(session.following_turn(turns[-1], id=len(turns), arrival_ns=0, has_next=True))
    return turns


def test_the_ladder_is_exact_for_the_ideal_cache_and_for_paged_in_whole_blocks() -> None:
    turns = equal_turns(64)
    chains = [block_chain(r.spans, 16) for r in turns]
    for hits in (list(reuse_hits(chains, None)), list(paged_hits(turns, AMPLE, 16))):
        assert [n / len(chain) for n, chain in zip(hits, chains, strict=True)] == [0, 1 / 2, 2 / 3, 3 / 4]
    assert [r.prompt_tokens for r in turns] == [64, 129, 194, 259]
    assert shares(turns) == [0, 64 / 129, 128 / 194, 192 / 259]


def test_the_last_token_of_an_answer_is_not_saved_and_costs_a_turn_the_block_that_it_would_fill() -> None:
    """Turn and answer are 64 tokens, of which 64 r - 1 are computed after turn r: 4 r - 1 whole blocks of 16."""
    turns = equal_turns(63)
    assert [r.prompt_tokens for r in turns] == [63, 127, 191, 255]
    assert shares(turns) == [0, 48 / 127, 112 / 191, 176 / 255]


def shares(asked: Sequence[Request]) -> list[float]:
    """Of the tokens of each prompt, those that paged finds in blocks of 16."""
    return [16 * hits / r.prompt_tokens for hits, r in zip(paged_hits(asked, AMPLE, 16), asked, strict=True)]


def test_of_prompts_that_end_with_a_block_paged_climbs_the_ladder_and_computes_a_repeated_ones_last_block() -> None:
    growing = requests(*(said("a", 64 * turn) for turn in (1, 2, 3, 4)), said("a", 64))
    assert shares(growing) == [0, 1 / 2, 2 / 3, 3 / 4, 48 / 64]


# A second model, and bugs


def model_hits(asked: Sequence[Request], num_blocks: int, block_size: int) -> Iterator[int]:
    """The rules of vLLM's pool for one request at a time, in a plain list: each block is [key or None, when keyed]."""
    queue: list[list[Any]] = [[None, 0] for _ in range(num_blocks - 1)]
    clock = 0
    for r in asked:
        spans = (*r.spans, (output_stream(r.session, r.turn), 0, r.output_tokens))
        tokens = [(stream, start + i) for stream, start, length in spans for i in range(length)][:-1]
        table: list[list[Any]] = []
        for end in range(block_size, r.prompt_tokens, block_size):  # never all of the prompt
            same = [block for block in queue if block[0] == tokens[:end]]
            if not same:
                break
            table.append(min(same, key=lambda block: block[1]))
        yield len(table)
        queue = [block for block in queue if not any(block is held for held in table)]
        while len(table) * block_size < len(tokens):
            block = queue.pop(0)
            block[0] = None
            table.append(block)
        for place, block in enumerate(table):
            end = (place + 1) * block_size
            if block[0] is None and end <= len(tokens):
                clock += 1
                block[:] = tokens[:end], clock
        backwards = table[::-1]
        queue = [b for b in backwards if b[0] is None] + queue + [b for b in backwards if b[0] is not None]


PIECES = st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(1, 5))
PROMPTS = st.lists(PIECES, min_size=1, max_size=3).map(tuple)
TRAFFIC = st.lists(PROMPTS, min_size=1, max_size=4).flatmap(
    lambda known: st.lists(st.sampled_from(known) | PROMPTS, max_size=14)
)
"""Prompts that come again, and others that begin alike."""


@given(
    prompts=TRAFFIC,
    output=st.integers(1, 6),
    block_size=st.integers(1, 4),
    spare=st.integers(0, 12),
    back=st.booleans(),
)
def test_random_requests_hit_what_the_naive_model_hits(
    prompts: list[tuple[Span, ...]], output: int, block_size: int, spare: int, back: bool
) -> None:
    asked = requests(*prompts, *(prompts if back else ()), output=output)
    longest = max([r.prompt_tokens + output for r in asked], default=1)
    num_blocks = 2 + -(-longest // block_size) + spare
    assert list(paged_hits(asked, num_blocks, block_size)) == list(model_hits(asked, num_blocks, block_size))
    if block_size == 1:
        return
    # Paged meets the ideal cache over whole blocks (asserted within), and the terms add up.
    (found,) = reuse_terms(asked, [num_blocks], block_size)
    assert found.ideal + sum(found.terms.values()) == found.paged
    assert found.partial_hits <= 0 <= found.partial_room
    assert max(found.filling_block, found.null_block) <= 0


class RootFirst(PagedPolicy):
    """Gives a chain back from its root on, which is then evicted before its tail."""

    def release(self, s: KVSequence, why: Release) -> None:
        self._tables[s.id].blocks.reverse()
        super().release(s, why)


class ForgetsLast(PagedPolicy):
    """Finds one block less than it could."""

    def lookup(self, s: KVSequence) -> int:
        return max(0, super().lookup(s) - self.config.block_size)


def older_version(layout: Any, arena: Any, config: PagedConfig) -> PagedPolicy:
    """Blocks without a key go to the tail of the queue, as they did before 0.27."""
    settings = {"num_blocks": config.num_blocks, "max_model_len": config.max_model_len}
    return PagedPolicy(
        layout, arena, PagedConfig(**settings, block_size=config.block_size, enable_prefix_caching=True, version="0.22")
    )


TELLING = requests(said("a", 17), said("b", 9), said("a", 17), said("c", 5), said("b", 9), said("a", 17))


@pytest.mark.parametrize("bug", [RootFirst, ForgetsLast, older_version])
def test_a_policy_that_keeps_other_blocks_does_not_meet_the_ideal_cache(
    monkeypatch: pytest.MonkeyPatch, bug: Any
) -> None:
    assert [found.whole_blocks for found in reuse_terms(TELLING, [6], 4)] == [8]
    monkeypatch.setattr(serial_reuse, "PagedPolicy", bug)
    with pytest.raises(AssertionError, match="paged is not the ideal cache"):
        reuse_terms(TELLING, [6], 4)


def test_touched_first_to_last_the_ideal_cache_does_not_meet_paged() -> None:
    whole = [block_chain(r.spans, 4) for r in TELLING]
    assert list(paged_hits(TELLING, 8, 4)) == list(reuse_hits(whole, 6)) == [0, 0, 4, 0, 1, 3]
    assert list(reuse_hits(whole, 6, last_to_first=False)) != list(reuse_hits(whole, 6))


# Beside the server, and on a real trace


def test_a_server_of_one_sequence_hits_what_the_serial_replay_hits() -> None:
    """Chats of six users, served one at a time by the whole twin from a pool that holds the histories of two or so."""
    scenario = Scenario.load(
        preset="paged",
        overrides=[
            *("kv_cache.enable_prefix_caching=true", "session.between_turns=prefix_cache", "scheduler.max_num_seqs=1"),
            *("engine.max_model_len=1024", "engine.gpu_memory_utilization=0.475", "kv_cache.block_size=16"),
            *("workload.users=6", "workload.num_prompts=48", "session.turns=4", "session.think_time_s=1"),
            'workload.prompt_tokens={distribution="uniform",low=1,high=120}',
            'workload.output_tokens={distribution="uniform",low=1,high=100}',
            "workload.system_prompt_tokens=24",
        ],
    )
    source = source_of(scenario)
    asked: dict[int, Request] = {}

    class Noted:
        total_requests = source.total_requests

        def open(self) -> Iterator[Request]:
            for r in source.open():
                asked[r.id] = r
                yield r

        def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
            following = source.next_turn(r, end_ns, status)
            if following is not None:
                asked[following.id] = following
            return following

    twin = Twin(scenario, source=Noted())
    served = twin.run().requests.sort_values("scheduled_ns")
    assert isinstance(twin.kv, PagedPolicy)
    assert served["preemptions"].sum() == 0
    in_order = [asked[id] for id in served["id"]]
    hits = list(paged_hits(in_order, twin.kv.config.num_blocks, 16))
    assert [16 * blocks for blocks in hits] == served["cached_tokens"].tolist()
    ample = list(paged_hits(in_order, AMPLE, 16))
    assert 0 < sum(hits) < sum(ample), "the pool is short"


@needs_mooncake
def test_the_first_mooncake_conversations_term_by_term() -> None:
    """1,500 of them; the meeting point, request by request, is asserted within."""
    asked = list(open_trace(MOONCAKE, num_prompts=1500).recorded())
    ideal = reuse_curve(islice(mooncake_chains(MOONCAKE), 1500), [1_000, 4_000])
    assert ideal.hits == (1_642, 3_949)
    nothing = dict.fromkeys(("partial_hits", "last_token"), 0)
    less = {"filling_block": -1, "null_block": -1}
    assert reuse_terms(asked, [1_000, 4_000], 512) == [
        ReuseTerms(
            capacity=1_000,
            references=41_702,
            ideal=1_642,
            partial_room=12,
            generated_tokens=-10,
            paged=1_642,
            **(nothing | less),
        ),
        ReuseTerms(
            capacity=4_000,
            references=41_702,
            ideal=3_949,
            partial_room=68,
            generated_tokens=-48,
            paged=3_960,
            **(nothing | less | {"partial_hits": -7}),
        ),
    ]


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")


def columns_of_the_page() -> dict[int, dict[str, int]]:
    """The table of docs/workloads.md: of each capacity the figures by the name of their row."""
    start = PAGE.index("| `capacity`")
    rows = [line.strip("| ").split(" | ") for line in PAGE[start : PAGE.index("\n\n", start)].splitlines()]
    table = {
        cells[0].strip("`"): [int(cell.replace(",", "")) for cell in cells[1:]]
        for cells in rows
        if cells[0].startswith("`")
    }
    capacities = table.pop("capacity")
    return {n: {name: cells[i] for name, cells in table.items()} for i, n in enumerate(capacities)}


def test_the_table_of_the_page_adds_up() -> None:
    columns = columns_of_the_page()
    assert list(columns) == [1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000]
    for found in columns.values():
        assert [*found] == [name for name in ReuseTerms.__slots__ if name not in ("capacity", "references")]
        assert sum(found.values()) == 2 * found["paged"]


@needs_mooncake
def test_the_whole_trace_through_paged() -> None:
    """One column of the page: the others were printed by the lines above its table."""
    hits = paged_hits(open_trace(MOONCAKE).recorded(), 10_000, 512)
    assert sum(hits) == columns_of_the_page()[10_000]["paged"] == 61_238


def test_the_lines_of_the_page_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    record = '{"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]}\n'
    (tmp_path / "conversation_trace.jsonl").write_text(record * 2, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert capsys.readouterr().out.splitlines()[0] == (
        "1000 3 {'partial_hits': -1, 'partial_room': 0, 'filling_block': 0, 'null_block': 0, 'last_token': 0, "
        "'generated_tokens': 0} 2"
    )


def test_a_request_that_does_not_fit_is_told() -> None:
    with pytest.raises(WorkloadError) as error:
        list(paged_hits(requests(said("a", 3), said("b", 9), output=5), 4, 4))
    assert str(error.value) == ("request 1 needs 4 blocks and the pool has 3 beside the null block: take a larger one")
    with pytest.raises(WorkloadError, match="request 0 needs 3 blocks and the pool has 2"):
        reuse_terms(requests(said("a", 9)), [3], 4)


def test_terms_of_blocks_of_one_token_are_refused() -> None:
    with pytest.raises(WorkloadError, match="terms are told apart for blocks of at least 2 tokens, not 1"):
        reuse_terms([], [5], 1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (4, 0)])
def test_a_pool_of_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(WorkloadError, match="a pool has at least 2 blocks, one the null block, of at least 1 token"):
        list(paged_hits([], num_blocks, block_size))


def test_no_requests_are_no_terms() -> None:
    nothing = dict.fromkeys(("references", "ideal", "partial_hits", "partial_room", "filling_block"), 0)
    nothing |= dict.fromkeys(("null_block", "last_token", "generated_tokens", "paged"), 0)
    assert reuse_terms([], [5, 7], 16) == [ReuseTerms(capacity=capacity, **nothing) for capacity in (5, 7)]
