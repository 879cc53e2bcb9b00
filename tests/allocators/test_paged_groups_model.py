"""Groups of layers against a second model, written from section 6 of specs/paged-kv.md alone (``groups_model``).

The traffic is the one that runs beside vLLM's own manager in ``scripts/validate_paged``: hits, grants, the table of
every group, free blocks, cache events and shared boundaries are compared at every operation, the free queue at every
fiftieth. The model itself is held to vLLM in ``tests/validation/test_vllm_groups``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from hbmtwin.validation.vllm.blocks import POOLS, groups_side
from hbmtwin.validation.vllm.comparison import Comparison
from hbmtwin.validation.vllm.traffic import Traffic

from .groups_model import NaiveGroups
from .groups_planted import MISTAKES

EACH = {"full": 900, "window": 2200, "chunked": 2200, "mamba": 2200}
"""Operations of each pool: more than 100,000 of all."""


@pytest.mark.parametrize("kind", EACH)
def test_every_table_hit_and_event_is_that_of_the_naive_model(kind: str) -> None:
    met: Counter[str] = Counter()
    for number, pool in enumerate(POOLS[kind]):
        both = Comparison(pool, groups_side(pool), NaiveGroups(pool))
        found = Traffic(both, seed=number).run(EACH[kind])
        assert found is None, f"{pool}: {found}"
        met += both.met
    for what in ("hits", "leap", "preemption", "refused admission", "refused decode", "refused chunk", "event removed"):
        assert met[what] >= 40, f"the traffic has too few of: {what}"
    assert (met["shared boundaries"] >= 100) == (kind != "full")


def test_the_runs_together_are_a_hundred_thousand_operations() -> None:
    assert sum(EACH[kind] * len(POOLS[kind]) for kind in EACH) >= 100_000


@pytest.mark.parametrize("mistaken", MISTAKES, ids=lambda mistaken: mistaken.__name__)
def test_a_mistake_in_one_rule_is_noticed(mistaken: type[NaiveGroups]) -> None:
    for number, pool in enumerate(POOLS[MISTAKES[mistaken]]):
        if Traffic(Comparison(pool, groups_side(pool), mistaken(pool)), seed=number).run(700) is not None:
            return
    pytest.fail("no pool shows it")
