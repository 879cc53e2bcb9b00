"""Two changes together, where none makes a server start alone.

::

    another change  x  max_model_len                 the rest has room, and one longest request still has not
    tensor_parallel_size  x  pipeline_parallel_size  ranks both ways
    tensor_parallel_size  x  quantization            ranks with smaller weights
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.fit.advice import SEARCHES, Advice, Change, Confirm, largest, starts_by_the_engine, tried
from hbmtwin.sim.phrases import Phrase, Said

BOTH = Phrase("{one} with {two}", "{one}，同时 {two}")
SHORTEST = 1024
"""Tokens of a request below which a server is of no use."""
WITH_LENGTH = (
    *("gpu_memory_utilization", "other_tenant_bytes", "num_gpu_blocks_override", "enable_chunked_prefill"),
    *("quantization", "tensor_parallel_size", "pipeline_parallel_size"),
)
"""By the names of their searches."""


def together(q: BudgetQuestion, confirm: Confirm) -> tuple[Advice, ...]:
    """Of each pair of kinds the first that starts and is confirmed. Some thousand budgets at worst."""
    return (*_with_length(q, confirm), *_of_ranks(q, confirm))


def both(one: Change, two: Advice) -> Advice:
    """One advice of two changes, the second of which was made on the first."""
    said, settings, _ = one
    return replace(two, change=Said.of(BOTH, one=said, two=two.change), settings={**settings, **two.settings})


def _with_length(q: BudgetQuestion, confirm: Confirm) -> Iterator[Advice]:
    """The change that leaves room for a short request, with the longest one that it then has room for."""
    searches = dict(SEARCHES)
    shortest = q.at_length(SHORTEST)
    for name in WITH_LENGTH if q.max_model_len > SHORTEST else ():
        for said, settings, other in searches[name](shortest, starts_by_the_engine):
            high = min(q.max_model_len, q.model.max_position_embeddings)
            length = largest(SHORTEST, high, partial(_starts_at, other))
            two = Said.of(BOTH, one=said, two=f"max_model_len {length}")
            change = {**settings, "max_model_len": length}
            if (advice := tried(two, change, other.at_length(length), starts_by_the_engine, confirm)) is not None:
                yield advice
                break


def _starts_at(q: BudgetQuestion, max_model_len: int) -> MemoryBudget | None:
    return starts_by_the_engine(q.at_length(max_model_len))


def _of_ranks(q: BudgetQuestion, confirm: Confirm) -> Iterator[Advice]:
    """Ranks both ways, and ranks with smaller weights: of each the first that starts, by the number of devices."""
    searches = dict(SEARCHES)
    by_ranks = list(searches["tensor_parallel_size"](q, starts_by_the_engine))
    for second in ("pipeline_parallel_size", "quantization"):
        changes = [
            (Said.of(BOTH, one=one, two=two), {**mine, **theirs}, other)
            for one, mine, first in by_ranks
            for two, theirs, other in searches[second](first, starts_by_the_engine)
        ]
        for said, settings, other in sorted(changes, key=lambda found: _devices_of(found[2])):
            if (advice := tried(said, settings, other, starts_by_the_engine, confirm)) is not None:
                yield advice
                break


def _devices_of(q: BudgetQuestion) -> tuple[int, int]:
    """How many devices it takes; of as many, fewer stages come first."""
    return q.ranks.tensor * q.ranks.pipeline, q.ranks.pipeline
