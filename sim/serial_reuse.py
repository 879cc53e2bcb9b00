"""What the paged policy's prefix cache hits of requests that come one at a time, beside the ideal cache, term by term.

::

    ideal                every block of a prompt can be kept and hit, a partial last one too; a request holds nothing
      + partial_hits     (-)  a partial block gets no key: what the ideal cache hits of them is lost
      + partial_room     (+)  nor is it kept: whole blocks have its room
      = whole_blocks     the ideal cache over whole blocks: here paged meets it, request by request
      + filling_block    (-)  a running request holds one block that is not full: one less to keep
      + null_block       (-)  block 0 is never handed out: one less again
      + last_token       (-)  a prompt's last token is computed anew, so a block that ends with it is, too, and may then
                              lie there twice
      + generated_tokens (-)  answers fill blocks, which push others out; (+) a later turn may find them
      = paged

Each term is the difference of two replays, of which one has it and the other has not. Ideal caches are those of
``workloads/statistics/reuse_curve.py``, touched last to first: paged lets the tail of a chain go before its root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from hbmtwin.allocators.direct import DirectAllocator, DirectConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.records import KVLayout, KVSequence, Refused, Release
from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.records import Request, Span, WorkloadError, output_stream
from hbmtwin.workloads.statistics.reuse_curve import reuse_hits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseTerms:
    """Blocks that requests hit in a cache of *capacity* blocks, and what lies between the ideal cache and paged."""

    capacity: int
    """Blocks of the ideal cache, and of the whole pool of paged, the null block included."""
    references: int
    """Blocks of all prompts, partial ones included."""
    ideal: int
    partial_hits: int
    partial_room: int
    filling_block: int
    null_block: int
    last_token: int
    generated_tokens: int
    paged: int

    @property
    def whole_blocks(self) -> int:
        """Hits of the ideal cache over whole blocks, and of paged where nothing else makes a difference."""
        return self.ideal + self.partial_hits + self.partial_room

    @property
    def terms(self) -> dict[str, int]:
        """The terms by name; their sum is ``paged - ideal``."""
        around = {"capacity", "references", "ideal", "paged"}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in around}


def reuse_terms(requests: Sequence[Request], capacities: Iterable[int], block_size: int) -> list[ReuseTerms]:
    """Replay *requests*, in their order and one at a time, at each of *capacities* (blocks of *block_size* tokens).

    Seven replays a capacity, each O(blocks of all prompts and answers). Raise WorkloadError where a request does not
    fit into the pool: a server refuses it, and no count of hits means the same then; and for a block size of 1.
    AssertionError is a bug of the policy: it hits otherwise than the ideal cache where nothing is left to make a
    difference.
    """
    if block_size < 2:
        raise WorkloadError(
            f"terms are told apart for blocks of at least 2 tokens, not {block_size}: it takes a block that is not full"
        )
    chains = [block_chain(r.spans, block_size, partial=True) for r in requests]
    whole = [chain[: r.prompt_tokens // block_size] for chain, r in zip(chains, requests, strict=True)]
    silent = [r._replace(output_tokens=1) for r in requests]  # the one token that is sampled is never computed
    cut = [_whole_blocks_and_one_token(r, block_size) for r in silent]
    return [_terms(requests, chains, whole, silent, cut, capacity, block_size) for capacity in capacities]


def _terms(
    requests: Sequence[Request],
    chains: Sequence[Sequence[bytes]],
    whole: Sequence[Sequence[bytes]],
    silent: Sequence[Request],
    cut: Sequence[Request],
    capacity: int,
    block_size: int,
) -> ReuseTerms:
    ideal = list(reuse_hits(chains, capacity))
    without_partial = list(reuse_hits(whole, capacity))
    partial_hits = sum(max(0, hits - len(ids)) for hits, ids in zip(ideal, whole, strict=True))
    met = list(paged_hits(cut, capacity + 2, block_size))
    assert met == without_partial, "paged is not the ideal cache over whole blocks"
    no_spare = sum(paged_hits(cut, capacity + 1, block_size))
    no_spares = sum(paged_hits(cut, capacity, block_size))
    uncut = sum(paged_hits(silent, capacity, block_size))
    paged = sum(paged_hits(requests, capacity, block_size))
    return ReuseTerms(
        capacity=capacity,
        references=sum(map(len, chains)),
        ideal=sum(ideal),
        partial_hits=-partial_hits,
        partial_room=sum(without_partial) - (sum(ideal) - partial_hits),
        filling_block=no_spare - sum(met),
        null_block=no_spares - no_spare,
        last_token=uncut - no_spares,
        generated_tokens=paged - uncut,
        paged=paged,
    )


def paged_hits(requests: Iterable[Request], num_blocks: int, block_size: int) -> Iterator[int]:
    """Yield the blocks that each of *requests* hits in a pool of paged KV with prefix caching, served one at a time.

    All tokens are computed but those hit and the last one of the answer; the next request comes when the blocks are
    free. *num_blocks* counts the null block, as vLLM's does. O(blocks of prompts and answers). Raise WorkloadError for
    a request that does not fit.
    """
    kv = _pool(num_blocks, block_size)
    for number, r in enumerate(requests):
        spans = (*r.spans, (output_stream(r.session, r.turn), 0, r.output_tokens))
        s = KVSequence(
            id=number,
            session=r.session,
            turn=r.turn,
            num_tokens=r.prompt_tokens,
            max_tokens=r.prompt_tokens + r.max_tokens,
            spans=spans,
        )
        hit = kv.lookup(s)
        answer = kv.reserve(s, s.num_tokens - hit, hit=hit, admitting=True)
        decoded = r.output_tokens - 1
        s.num_computed_tokens = s.num_tokens
        s.num_tokens += 1
        if isinstance(answer, Refused) or kv.horizon([s], decoded) < decoded:
            need = -(-(r.prompt_tokens + decoded) // block_size)
            raise WorkloadError(
                f"request {r.id} needs {need} blocks and the pool has {num_blocks - 1} beside the null block: "
                "take a larger one"
            )
        kv.end_step()
        kv.advance([s], decoded)
        s.num_computed_tokens += decoded
        s.num_tokens += decoded
        kv.release(s, Release.FINISH)
        yield hit // block_size


_TOKEN = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
"""Hits do not depend on the bytes of a token: the smallest that there is."""
_NO_LIMIT = 1 << 62


def _pool(num_blocks: int, block_size: int) -> PagedPolicy:
    if num_blocks < 2 or block_size < 1:
        raise WorkloadError(
            f"a pool has at least 2 blocks, one the null block, of at least 1 token, not {num_blocks} of {block_size}"
        )
    pool_bytes = 2 * num_blocks * block_size * _TOKEN.token_bytes
    driver = HbmDriver(pool_bytes + (64 << 20))
    arena = DirectAllocator(driver, DirectConfig(limit_bytes=pool_bytes + (32 << 20)))
    config = PagedConfig(
        num_blocks=num_blocks, max_model_len=_NO_LIMIT, block_size=block_size, enable_prefix_caching=True
    )
    return PagedPolicy(_TOKEN, arena, config)


def _whole_blocks_and_one_token(r: Request, block_size: int) -> Request:
    """Its prompt up to its last whole block, and a token that no other request has: each request then has one block
    that is not full, and no block ends with the last token."""
    tokens = r.prompt_tokens // block_size * block_size
    spans = (*_first(r.spans, tokens), (f"cut/{r.id}", 0, 1))
    return r._replace(prompt_tokens=tokens + 1, spans=spans)


def _first(spans: tuple[Span, ...], tokens: int) -> Iterator[Span]:
    for stream, start, length in spans:
        if tokens <= 0:
            return
        yield stream, start, min(length, tokens)
        tokens -= length
